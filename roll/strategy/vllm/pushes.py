"""`Pushes`: weights are replaced while no request runs, and requests run on whole weights only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from roll.core.errors import IncompleteWeightsError, WeightSyncError
from roll.strategy.interfaces import LoadReport
from roll.strategy.serving.progress import Progress

Part = Literal["weights", "adapter"]


class Pushes:
    """The version of the weights in use, and the gate between requests and pushes.

    Args:
        engine: what messages call the engine.
        running: the requests under way.
        outsiders: requests may run that are not in `running`.
    """

    def __init__(self, engine: str, running: Progress, *, outsiders: bool) -> None:
        self.version = 0
        self._broken: dict[Part, str] = {}
        """Why a part of the weights cannot be used. A push of that part mends it: ranks that have
        different adapters keep them through a push of weights."""
        self._name = engine
        self._running = running
        self._outsiders = outsiders
        self._open = asyncio.Event()
        self._paused = False

    @property
    def under_way(self) -> bool:
        return not self._open.is_set()

    def open(self) -> None:
        """Let requests in, now that the engine has started."""
        self._open.set()

    async def enter(self) -> None:
        """Returns when a request may start.

        Raises:
            IncompleteWeightsError: there are no whole weights to run it on.
        """
        await self._open.wait()
        self.require_whole_weights()

    def breaks(self, part: Part, why: str) -> None:
        """From now on this part cannot be used, until it is pushed again."""
        self._broken[part] = why

    def require_whole_weights(self) -> None:
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
        """Let vLLM's workers take a push; running requests then compute their KV cache anew.

        Args:
            engine: vLLM's `AsyncLLM`.
            method: of the workers; it returns the numbers of a `LoadReport`, or an `error` and
                whether the weights are still `intact`.
            part: what the push brings all of, and so mends where it was broken.

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
        pause = len(self._running) > 0 or self._outsiders
        if pause and not self._paused:
            await engine.pause_generation(mode="keep", clear_cache=False)
            self._paused = True
        try:
            with self._breaking(part):
                answers = await engine.collective_rpc(method, args=arguments)
            report = self._judge(answers, version, part)
            with self._breaking(part):  # new weights under an old version, or with an old KV cache
                await engine.update_weight_version(str(version))
                await engine.reset_prefix_cache(reset_running_requests=pause)
            self._broken.pop(part, None)
            self.version = version
        finally:
            if self._broken:
                # They end with an error; requests from outside stay paused until weights are whole.
                await engine.abort(list(self._running))
            elif self._paused:
                await engine.resume_generation()
                self._paused = False
        return report

    @contextmanager
    def _breaking(self, part: Part) -> Iterator[None]:
        """Where vLLM fails outside of what its ranks tell of, nobody knows what they have."""
        try:
            yield
        except Exception as error:
            self.breaks(part, failure(error))
            if type(error) is Exception:  # so vLLM tells of it; others say that it is dead
                raise WeightSyncError(f"{self._name}: {error}") from error
            raise

    def _judge(self, answers: list[dict[str, Any]], version: int, part: Part) -> LoadReport:
        """One report out of the ranks' answers."""
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


def failure(error: Exception) -> str:
    """What a worker answers for an error in a push: the type of one that is not ours tells more
    than its words, and would be lost on the way."""
    return str(error) if isinstance(error, WeightSyncError) else f"{type(error).__name__}: {error}"
