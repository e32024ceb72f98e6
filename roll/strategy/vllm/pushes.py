"""`Pushes`: replaces weights while no request runs; lets requests run on complete weights only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from roll.core.errors import IncompleteWeightsError, WeightSyncError, failure
from roll.strategy.interfaces import LoadReport
from roll.strategy.serving.progress import Progress
from roll.strategy.serving.sleep import SleepState

Part = Literal["weights", "adapter"]


class Pushes:
    """Version of the weights in use, and gate that keeps requests and pushes apart.

    Args:
        engine: name of the engine in error messages.
        running: requests under way.
        sleep: memory that the engine has given back.
        outsiders: true if requests may run that are not in `running`, such as the endpoint's.
    """

    def __init__(
        self, engine: str, running: Progress, sleep: SleepState, *, outsiders: bool
    ) -> None:
        self.version = 0
        self._broken: dict[Part, str] = {}
        """Broken part of the weights -> why it cannot be used.

        Only a push of the same part repairs it: a push of weights does not change adapters, so
        ranks with different adapters keep them."""
        self._name = engine
        self._running = running
        self._sleep = sleep
        self._outsiders = outsiders
        self._open = asyncio.Event()
        self._paused = False

    @property
    def under_way(self) -> bool:
        """True during a push, and before `open`."""
        return not self._open.is_set()

    def open(self) -> None:
        """Let requests in, now that the engine has started."""
        self._open.set()

    async def enter(self) -> None:
        """Wait until a request may start.

        Raises:
            IncompleteWeightsError: the weights are incomplete, so no request can run.
        """
        await self._open.wait()
        self.require_whole_weights()

    def breaks(self, part: Part, why: str) -> None:
        """Mark `part` as broken, so that no request runs until the part is pushed again."""
        self._broken[part] = why

    def require_whole_weights(self) -> None:
        """Raise an error if the weights or the adapter are incomplete.

        Raises:
            IncompleteWeightsError: one of them is.
        """
        for part, why in self._broken.items():
            which = "incomplete weights" if part == "weights" else "an incomplete adapter"
            raise IncompleteWeightsError(
                f"{self._name} has {which}; push all of them again ({why})"
            )

    async def replace(
        self,
        engine: Any,
        method: str,
        arguments: tuple[Any, ...],
        version: int,
        *,
        part: Part,
        verify: bool,
    ) -> LoadReport:
        """Let vLLM's workers receive a push; running requests then recompute their KV cache.

        Args:
            engine: vLLM's `AsyncLLM`.
            method: name of the workers' method that receives the push. It returns the numbers of a
                `LoadReport`, or an `error` and whether the weights are still `intact`.
            arguments: arguments of `method`.
            version: version of the weights that the push brings.
            part: part of the weights that the push replaces completely, and repairs if broken.
            verify: require a checksum.

        Raises:
            WeightSyncError: the push was refused or broke off.
        """
        self._open.clear()
        try:
            report = await self._replace(engine, method, arguments, version, part)
        finally:
            self._open.set()
        if verify and report.checksum is None:
            raise WeightSyncError("a checksum was asked for, but the sender made none")
        return report

    async def _replace(
        self, engine: Any, method: str, arguments: tuple[Any, ...], version: int, part: Part
    ) -> LoadReport:
        """Pause requests, push, drop the caches, resume; abort requests if weights are broken."""
        # While memory is given back, the scheduler rests already. Resumed before the KV cache is
        # there, it would run requests of outsiders, which have queued, in memory that is not; the
        # wake-up that takes back the rest resumes it.
        asleep = bool(self._sleep.asleep)
        pause = (len(self._running) > 0 or self._outsiders) and not asleep
        if pause and not self._paused:
            await engine.pause_generation(mode="keep", clear_cache=False)
            self._paused = True
        try:
            with self._breaking(part):
                answers = await engine.collective_rpc(method, args=arguments)
            report = self._judge(answers, version, part)
            with self._breaking(part):  # else new weights could have an old version or KV cache
                await engine.update_weight_version(str(version))
                # A push clears the workers' embeddings of pictures, but the scheduler still counts
                # on them: the next request with a known picture would end the engine. The reset of
                # the KV cache schedules running requests anew, so it comes second.
                await engine.reset_encoder_cache()
                await _drop_kv(engine, running=pause)
            self._broken.pop(part, None)
            self.version = version
        finally:
            if self._broken:
                # These requests end with an error. The endpoint's requests stay paused until the
                # weights are complete.
                await engine.abort(list(self._running))
            elif self._paused:
                if not asleep:
                    await engine.resume_generation()
                self._paused = False
        return report

    @contextmanager
    def _breaking(self, part: Part) -> Iterator[None]:
        """Mark `part` as broken if vLLM itself fails: the weights of its ranks are then unknown.

        Raises:
            WeightSyncError: vLLM reported a failed call. Other errors pass through.
        """
        try:
            yield
        except Exception as error:
            self.breaks(part, failure(error))
            if type(error) is Exception:  # a failed call; other types mean that vLLM is dead
                raise WeightSyncError(f"{self._name}: {error}") from error
            raise

    def _judge(self, answers: list[dict[str, Any]], version: int, part: Part) -> LoadReport:
        """Combine the answers of all ranks into one report.

        Raises:
            WeightSyncError: a rank answered with an error. If the weights of any rank are not
                intact, `part` is marked as broken.
        """
        errors = [answer for answer in answers if "error" in answer]
        if errors:
            if not all(answer.get("intact", False) for answer in answers):
                self.breaks(part, errors[0]["error"])
            raise WeightSyncError(f"{self._name}: {errors[0]['error']}")
        first = answers[0]
        return LoadReport(
            version,
            first["num_tensors"],
            first["num_bytes"],
            first["checksum"],
            max(answer["receive_s"] for answer in answers),
            max(answer["load_s"] for answer in answers),
        )


async def _drop_kv(engine: Any, *, running: bool) -> None:
    """Drop all keys and values that old weights have computed, also those that were moved off the
    devices (`kv_offloading_size`).

    Args:
        running: requests run, which compute theirs again.

    Raises:
        WeightSyncError: some could not be dropped.
    """
    if await engine.reset_prefix_cache(reset_running_requests=running, reset_connector=True):
        return
    # vLLM keeps the whole cache while a request holds a block of it.
    if not await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        raise WeightSyncError("vLLM did not drop the KV cache of the weights before")
