"""What a push that broke off leaves an engine of several ranks with, and what mends it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from roll.core.errors import EngineError, WeightSyncError
from roll.strategy.serving.progress import Progress
from roll.strategy.serving.sleep import SleepState
from roll.strategy.vllm.pushes import Part, Pushes

DONE: dict[str, Any] = {
    "num_tensors": 1,
    "num_bytes": 4,
    "checksum": "c",
    "receive_s": 0.0,
    "load_s": 0.0,
}
REFUSED: dict[str, Any] = {"error": "does not fit", "intact": True}
TORN: dict[str, Any] = {"error": "broke off", "intact": False}
FAILED = Exception("Call to collective_rpc method failed: a shape is wrong")
"""As vLLM tells of an exception in a rank."""
CACHED: list[dict[str, Any]] = [DONE, DONE, {"error": "the KV cache could not be dropped"}]
"""All ranks took it, and what follows fails."""
Answers = Sequence[dict[str, Any]] | Exception


class Ranks:
    """As much of vLLM's engine as a push calls; its ranks give the answers in turn."""

    def __init__(self, *answers: Answers, resets: Sequence[bool] = ()) -> None:
        self._answers = list(answers)
        self._answers_to_resets = list(resets)
        self.resets: list[bool] = []

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        answers = self._answers.pop(0)
        if isinstance(answers, Exception):
            raise answers
        self._cached = answers is CACHED
        return [answer for answer in answers if answer is not CACHED[-1]]

    async def update_weight_version(self, version: str) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def reset_prefix_cache(
        self, *, reset_running_requests: bool, reset_connector: bool
    ) -> bool:
        assert reset_connector
        if self._cached:
            raise Exception(CACHED[-1]["error"])
        self.resets.append(reset_running_requests)
        return self._answers_to_resets.pop(0) if self._answers_to_resets else True

    async def abort(self, requests: list[str]) -> None: ...


class Scheduler(Ranks):
    """Ranks of an engine that also notes when its scheduler stops and goes on."""

    def __init__(self, *answers: Answers) -> None:
        super().__init__(*answers)
        self.said: list[str] = []

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.said.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.said.append("resume")

    async def give_back(self, tags: Sequence[str]) -> None:
        """As much of sleep as a push can see."""

    async def take(self, tags: Sequence[str]) -> None:
        """As much of a wake-up as a push can see."""


def usable_after(*pushes: tuple[Part, Answers]) -> bool:
    """Whether requests may run after these pushes, some of which fail."""

    async def run() -> bool:
        state = Pushes("vLLM", Progress(), SleepState("cpu"), outsiders=False)
        state.open()
        engine = Ranks(*(answers for _, answers in pushes))
        for version, (part, answers) in enumerate(pushes):
            work = state.replace(engine, "push", (), version, part=part, verify=True)
            if isinstance(answers, Exception) or any("error" in answer for answer in answers):
                with pytest.raises(WeightSyncError, match=r"^vLLM: "):
                    await work
            else:
                await work
        try:
            await state.enter()
        except EngineError:
            return False
        return True

    return asyncio.run(run())


@pytest.mark.parametrize("part", ["weights", "adapter"])
def test_a_push_that_only_some_ranks_took_is_mended_by_the_next_of_its_kind(part: Part) -> None:
    torn_ones: list[Answers] = [[DONE, REFUSED], [DONE, TORN], [TORN, TORN], FAILED, CACHED]
    for torn in torn_ones:
        assert not usable_after((part, torn))
        assert usable_after((part, torn), (part, [DONE, DONE]))
    assert usable_after((part, [REFUSED, REFUSED]))


def test_weights_do_not_mend_an_adapter_nor_the_other_way_round() -> None:
    torn, whole = [DONE, TORN], [DONE, DONE]
    assert not usable_after(("adapter", torn), ("weights", whole))
    assert not usable_after(("weights", torn), ("adapter", whole))
    assert usable_after(
        ("adapter", torn),
        ("weights", torn),
        ("adapter", whole),
        ("weights", whole),
    )


def test_a_push_to_an_engine_without_its_kv_cache_lets_no_request_of_others_run() -> None:
    """vLLM's scheduler rests while the engine sleeps, and the whole wake-up lets it go on."""

    async def run() -> None:
        sleep = SleepState("cuda")
        pushes = Pushes("vLLM", Progress(), sleep, outsiders=True)
        engine = Scheduler(*[[DONE]] * 2, [TORN], *[[DONE]] * 2)

        async def push() -> list[str]:
            engine.said = []
            await pushes.replace(engine, "push", (), 1, part="weights", verify=True)
            return engine.said

        assert await push() == ["pause keep", "resume"]
        await sleep.sleep(engine.give_back)
        await sleep.wake(engine.take, weights_only=True)
        assert await push() == []
        await sleep.wake(engine.take, weights_only=False)
        with pytest.raises(WeightSyncError):
            await push()
        await sleep.sleep(engine.give_back)
        await sleep.wake(engine.take, weights_only=True)
        assert await push() == []
        await sleep.wake(engine.take, weights_only=False)
        assert await push() == ["pause keep", "resume"]

    asyncio.run(run())


def test_a_push_needs_the_keys_and_values_of_old_weights_dropped() -> None:
    """vLLM drops none while a request that nobody waits for holds a block, and says so."""

    async def pushed(*resets: bool) -> list[bool]:
        state = Pushes("vLLM", Progress(), SleepState("cpu"), outsiders=False)
        engine = Ranks([DONE], resets=resets)
        await state.replace(engine, "push", (), 1, part="weights", verify=True)
        return engine.resets

    assert asyncio.run(pushed(True)) == [False]
    assert asyncio.run(pushed(False, True)) == [False, True]
    with pytest.raises(WeightSyncError, match="did not drop the KV cache"):
        asyncio.run(pushed(False, False))
