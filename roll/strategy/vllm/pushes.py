"""`Pushes`: weights are replaced while no request runs, and requests run on whole weights only."""

from __future__ import annotations

import asyncio
from typing import Any

from roll.core.errors import IncompleteWeightsError, WeightSyncError
from roll.strategy.api import LoadReport
from roll.strategy.progress import Progress


class Pushes:
    """The version of the weights in use, and the gate between requests and pushes.

    Args:
        engine: what messages call the engine.
        running: the requests under way.
        outsiders: requests may run that are not in `running`.
    """

    def __init__(self, engine: str, running: Progress, *, outsiders: bool) -> None:
        self.version = 0
        self.broken: str | None = None
        """Why the weights cannot be used."""
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

    def require_whole_weights(self) -> None:
        if self.broken is not None:
            raise IncompleteWeightsError(
                f"{self._name} has incomplete weights; push all of them again ({self.broken})"
            )

    async def replace(
        self,
        engine: Any,
        method: str,
        arguments: tuple[Any, ...],
        version: int,
        *,
        whole: bool,
        verify: bool,
    ) -> LoadReport:
        """Let vLLM's workers take a push; running requests then compute their KV cache anew.

        Args:
            engine: vLLM's `AsyncLLM`.
            method: of the workers; it returns the numbers of a `LoadReport`, or an `error` and
                whether the weights are still `intact`.
            whole: the push brings all weights, and so mends those that were broken.

        Raises:
            WeightSyncError: the push was refused or broke off.
        """
        self._open.clear()
        try:
            report = await self._replace(engine, method, arguments, version, whole=whole)
        finally:
            self._open.set()
        if verify and report.checksum is None:
            raise WeightSyncError("a checksum was asked for, but the sender made none")
        return report

    async def _replace(
        self, engine: Any, method: str, arguments: tuple[Any, ...], version: int, *, whole: bool
    ) -> LoadReport:
        pause = len(self._running) > 0 or self._outsiders
        if pause and not self._paused:
            await engine.pause_generation(mode="keep", clear_cache=False)
            self._paused = True
        try:
            report = self._judge(await engine.collective_rpc(method, args=arguments), version)
            self.broken = None if whole else self.broken
            await engine.update_weight_version(str(version))
            await engine.reset_prefix_cache(reset_running_requests=pause)
            self.version = version
        finally:
            if self.broken is not None:
                # They end with an error; requests from outside stay paused until weights are whole.
                await engine.abort(list(self._running))
            elif self._paused:
                await engine.resume_generation()
                self._paused = False
        return report

    def _judge(self, answers: list[dict[str, Any]], version: int) -> LoadReport:
        """One report out of the ranks' answers."""
        errors = [answer for answer in answers if "error" in answer]
        if errors:
            if not all(answer.get("intact", False) for answer in answers):
                self.broken = errors[0]["error"]
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
