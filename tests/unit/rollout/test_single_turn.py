"""One group, and one request on a replica: seeds, timeouts, and nothing left on the engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from roll.core.completion import Completion
from roll.core.errors import EngineError, RewardError, WaitTimeoutError
from roll.core.types import GenerateRequest, Sample
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.replica import Replica
from roll.rollout.single_turn import group_seed
from roll.rollout.types import GroupTask, ScoredSample
from tests.fakes import SAMPLING, ScriptedEngine, completion, prompt, single_turn

TASK = GroupTask(prompt("p0"), step=4)
REQUEST = GenerateRequest("4/p0", (1, 2, 3), SAMPLING, n=2)


def test_siblings_are_decoded_scored_and_named_in_order() -> None:
    group = asyncio.run(single_turn(ScriptedEngine(), samples_per_prompt=3, seed=5).run(TASK))
    seed = group_seed(5, "4/p0")
    tokens = [(seed + i) % 1000 for i in range(3)]
    assert [one.sample.id for one in group.samples] == ["4/p0/0", "4/p0/1", "4/p0/2"]
    assert [one.sample.response_text for one in group.samples] == [str(t) for t in tokens]
    assert list(group.rewards) == [float(t % 2) for t in tokens]
    assert group.timing is not None
    assert group.timing.started_s <= group.timing.generated_s <= group.timing.scored_s


def test_a_text_that_comes_with_a_completion_is_not_decoded_again() -> None:
    class Decodes(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            first, *others = await super().generate(request)
            written = replace(first.content.get(), text="decoded")
            return [replace(first, content=written), *others]

    group = asyncio.run(single_turn(Decodes(), seed=5).run(TASK))
    token = (group_seed(5, "4/p0") + 1) % 1000
    assert [one.sample.response_text for one in group.samples] == ["decoded", str(token)]


def test_a_seed_depends_on_run_step_and_prompt_and_is_stable() -> None:
    assert group_seed(0, "0/a:1") == 157831519212769  # printf 0/0/a:1 | b2sum -l 48
    others = {group_seed(1, "0/a:1"), group_seed(0, "1/a:1"), group_seed(0, "0/a:2")}
    assert len(others | {group_seed(0, "0/a:1")}) == 4
    assert all(0 <= seed < 2**48 for seed in others)


def test_a_request_timeout_names_request_and_replica_and_aborts_it() -> None:
    engine = ScriptedEngine(turns=lambda request: None)
    rollout = single_turn(engine, request_timeout_s=0.02)
    with pytest.raises(WaitTimeoutError, match=r"request 4/p0 .* replica 0 .* 0\.02 s"):
        asyncio.run(rollout.run(TASK))
    assert engine.aborted == ["4/p0"]
    assert engine.running == {}


def test_a_reward_timeout_names_the_group() -> None:
    async def never(samples: list[Sample]) -> list[ScoredSample]:
        await asyncio.sleep(60)
        return []

    rollout = single_turn(ScriptedEngine(), score=never, reward_timeout_s=0.02)
    with pytest.raises(WaitTimeoutError, match=r"rewards of group 4/p0 .* 0\.02 s"):
        asyncio.run(rollout.run(TASK))


def test_a_timeout_inside_a_reward_is_not_taken_for_our_own() -> None:
    async def own(samples: list[Sample]) -> list[ScoredSample]:
        raise TimeoutError("the grader's own")

    with pytest.raises(TimeoutError, match="the grader's own"):
        asyncio.run(single_turn(ScriptedEngine(), score=own).run(TASK))


def test_an_engine_that_returns_too_few_samples_is_refused() -> None:
    class Odd(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            return [completion(1)]

    with pytest.raises(EngineError, match="wanted 2 samples; the engine of replica 0 returned 1"):
        asyncio.run(single_turn(Odd()).run(TASK))


def test_siblings_as_requests_of_their_own_give_the_same_samples() -> None:
    together = asyncio.run(single_turn(ScriptedEngine(), samples_per_prompt=3).run(TASK))
    engine = ScriptedEngine()
    apart = asyncio.run(single_turn(engine, samples_per_prompt=3, separate_siblings=True).run(TASK))
    assert apart.samples == together.samples
    assert engine.seen == ["4/p0/0", "4/p0/1", "4/p0/2"]


def test_a_separate_sibling_is_scored_while_another_one_is_generated() -> None:
    engine = ScriptedEngine(turns=lambda request: None if request.id.endswith("/1") else 0)

    async def score_and_release(samples: list[Sample]) -> list[ScoredSample]:
        for waiting in engine.running.values():
            waiting.set()
        raise RewardError("scored while its sibling was generated")

    rollout = single_turn(engine, score=score_and_release, separate_siblings=True)
    with pytest.raises(RewardError, match="while its sibling"):
        asyncio.run(rollout.run(TASK))


def test_redundant_siblings_race_and_the_last_ones_are_aborted() -> None:
    engine = ScriptedEngine(turns=lambda request: None if request.id.endswith(("/0", "/2")) else 1)
    rollout = single_turn(engine, samples_per_prompt=2, separate_siblings=True, redundant=2)
    group = asyncio.run(rollout.run(TASK))
    assert [one.sample.id for one in group.samples] == ["4/p0/1", "4/p0/3"]
    assert sorted(engine.aborted) == ["4/p0/0", "4/p0/2"]
    assert engine.running == {}


def test_verdicts_in_another_order_are_refused() -> None:
    async def reversed_(samples: list[Sample]) -> list[ScoredSample]:
        return [ScoredSample(sample, 0.0) for sample in reversed(samples)]

    with pytest.raises(RewardError, match=r"came back for \['4/p0/1', '4/p0/0'\]"):
        asyncio.run(single_turn(ScriptedEngine(), score=reversed_).run(TASK))


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (float("nan"), r"4/p0/0, the sum of all, must be finite, found nan; look at"),
        (1e39, r"4/p0/0, the sum of all, must lie between -1e\+15 and 1e\+15, found 1e\+39"),
    ],
)
def test_a_reward_with_which_no_step_can_compute_is_refused(reward: float, told: str) -> None:
    async def scored(samples: list[Sample]) -> list[ScoredSample]:
        return [ScoredSample(sample, reward) for sample in samples]

    with pytest.raises(RewardError, match=told):
        asyncio.run(single_turn(ScriptedEngine(), score=scored).run(TASK))


def test_a_replica_counts_what_is_under_way_and_forgets_it_at_the_end() -> None:
    engine = ScriptedEngine(turns=lambda request: 3)
    replica = engine.replica(capacity=2)

    async def look_inside() -> None:
        fleet = Fleet([replica])
        running = asyncio.create_task(fleet.generate(REQUEST, session="p0", timeout_s=5))
        await asyncio.sleep(0)
        assert (replica.in_flight_tokens, replica.in_flight_sequences) == (3 + 2 * 8, 2)
        assert not replica.open
        await running
        assert replica.in_flight_tokens == replica.in_flight_sequences == 0
        assert replica.open

    asyncio.run(look_inside())


def test_an_abort_that_overtakes_its_request_is_repeated() -> None:
    class HearsTheSecond(ScriptedEngine):
        async def abort(self, request_id: str) -> None:
            self.aborted.append(request_id)
            if len(self.aborted) == 2:
                self.running[request_id].set()

    engine = HearsTheSecond(turns=lambda request: None)
    with pytest.raises(WaitTimeoutError):
        asyncio.run(engine.replica().run(REQUEST, timeout_s=0.01))
    assert engine.aborted == ["4/p0", "4/p0"]


def test_a_failing_abort_does_not_hide_the_error(caplog: pytest.LogCaptureFixture) -> None:
    class CannotAbort(ScriptedEngine):
        async def abort(self, request_id: str) -> None:
            raise EngineError("replica is gone")

    engine = CannotAbort(turns=lambda request: None)
    with pytest.raises(WaitTimeoutError):
        asyncio.run(engine.replica().run(REQUEST, timeout_s=0.01))
    assert "replica is gone" in caplog.text


def test_an_engine_that_ignores_aborts_is_left_after_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class IgnoresAborts(ScriptedEngine):
        async def abort(self, request_id: str) -> None:
            return None

    replica = Replica(3, IgnoresAborts(turns=lambda request: None), abort_timeout_s=0.02)
    with pytest.raises(WaitTimeoutError):
        asyncio.run(replica.run(REQUEST, timeout_s=0.01))
    assert "replica 3: abort failed: it did not end within 0.02 s" in caplog.text
