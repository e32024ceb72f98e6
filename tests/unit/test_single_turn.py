"""One group, and one request on a replica: seeds, timeouts, and nothing left on the engine."""

from __future__ import annotations

import asyncio

import pytest

from roll.core.errors import EngineError, RewardError, WaitTimeoutError
from roll.core.types import Completion, FinishReason, GenerateRequest, Sample
from roll.rollout.engines import Replica
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


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ([completion(1)], "wanted 2 finished samples; the engine returned 1, 0 of them"),
        (
            [completion(1), completion(2, finish=FinishReason.ABORT)],
            "2, 1 of them aborted",
        ),
    ],
)
def test_an_engine_that_returns_something_else_is_refused(
    answers: list[Completion], match: str
) -> None:
    class Odd(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            return answers

    with pytest.raises(EngineError, match=match):
        asyncio.run(single_turn(Odd()).run(TASK))


def test_verdicts_in_another_order_are_refused() -> None:
    async def reversed_(samples: list[Sample]) -> list[ScoredSample]:
        return [ScoredSample(sample, 0.0) for sample in reversed(samples)]

    with pytest.raises(RewardError, match=r"came back for \['4/p0/1', '4/p0/0'\]"):
        asyncio.run(single_turn(ScriptedEngine(), score=reversed_).run(TASK))


def test_a_reward_that_is_not_finite_is_refused() -> None:
    async def nan(samples: list[Sample]) -> list[ScoredSample]:
        return [ScoredSample(sample, float("nan")) for sample in samples]

    with pytest.raises(RewardError, match="4/p0/0 has reward nan"):
        asyncio.run(single_turn(ScriptedEngine(), score=nan).run(TASK))


def test_a_replica_counts_what_is_under_way_and_forgets_it_at_the_end() -> None:
    engine = ScriptedEngine(turns=lambda request: 3)
    replica = engine.replica(capacity=2)

    async def look_inside() -> None:
        running = asyncio.create_task(replica.run(REQUEST, timeout_s=5))
        await asyncio.sleep(0)
        assert (replica.in_flight_tokens, replica.in_flight_sequences) == (3 + 2 * 8, 2)
        assert not replica.has_room
        await running
        assert replica.in_flight_tokens == replica.in_flight_sequences == 0
        assert replica.has_room

    asyncio.run(look_inside())


def test_an_abort_that_overtakes_its_request_is_repeated() -> None:
    ends = asyncio.Event()
    aborts: list[str] = []

    async def generate(request: GenerateRequest) -> list[Completion]:
        await ends.wait()
        return []

    async def abort(request_id: str) -> None:
        aborts.append(request_id)
        if len(aborts) == 2:
            ends.set()

    replica = Replica(0, generate, abort, abort_timeout_s=5)
    with pytest.raises(WaitTimeoutError):
        asyncio.run(replica.run(REQUEST, timeout_s=0.01))
    assert aborts == ["4/p0", "4/p0"]
    assert replica.in_flight_sequences == 0


def test_a_failing_abort_does_not_hide_the_error(caplog: pytest.LogCaptureFixture) -> None:
    async def generate(request: GenerateRequest) -> list[Completion]:
        await asyncio.sleep(60)
        return []

    async def abort(request_id: str) -> None:
        raise EngineError("replica is gone")

    with pytest.raises(WaitTimeoutError):
        asyncio.run(Replica(0, generate, abort).run(REQUEST, timeout_s=0.01))
    assert "replica is gone" in caplog.text


def test_an_engine_that_ignores_aborts_is_left_after_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def generate(request: GenerateRequest) -> list[Completion]:
        await asyncio.sleep(60)
        return []

    async def abort(request_id: str) -> None:
        return None

    with pytest.raises(WaitTimeoutError):
        asyncio.run(Replica(3, generate, abort, abort_timeout_s=0.02).run(REQUEST, timeout_s=0.01))
    assert "replica 3: abort failed: it did not end within 0.02 s" in caplog.text
