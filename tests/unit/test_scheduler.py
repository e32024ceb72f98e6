"""The scheduler over scripted engines: bounds, replacement, aborts, errors, and exact books."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.errors import EngineError, RollError
from roll.core.types import GenerateRequest
from roll.rollout.filters import equal_rewards
from roll.rollout.scheduler import CollectResult, GenerateScheduler
from roll.rollout.types import Group, GroupTask
from tests.fakes import ScriptedEngine, group, prompt, single_turn

T = TypeVar("T")


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end and see that no task is left behind."""

    async def alone() -> T:
        try:
            return await asyncio.wait_for(work, 10)
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"still running: {left}"

    return asyncio.run(alone())


def numbered(count: int = 10_000) -> Any:
    return iter([prompt(f"p{i}") for i in range(count)])


def number(request: GenerateRequest) -> int:
    """3 for prompt `p3`."""
    return int(request.id.split("/p")[1].split("+")[0])


def ids(groups: list[Group]) -> list[str]:
    return [one.prompt.id for one in groups]


def reject_listed(*names: str) -> Any:
    return lambda one: "listed" if one.prompt.id in names else None


def test_groups_come_back_in_the_order_of_their_prompts_whoever_ends_first() -> None:
    engine = ScriptedEngine(turns=lambda request: 50 - 5 * number(request))
    scheduler = GenerateScheduler(numbered(), single_turn(engine).run)
    result = finish(scheduler.collect(8, step=0))
    assert ids(result.groups) == [f"p{i}" for i in range(8)]
    assert result.unused == ()
    assert engine.aborted == []


def test_no_more_groups_run_at_once_than_allowed() -> None:
    engine = ScriptedEngine(turns=lambda request: 3)
    scheduler = GenerateScheduler(numbered(), single_turn(engine).run, max_in_flight=3)
    finish(scheduler.collect(10, step=0))
    assert engine.peak == 3


def test_a_rejected_group_is_replaced_by_the_next_prompt() -> None:
    engine = ScriptedEngine(turns=lambda request: number(request) % 4)
    scheduler = GenerateScheduler(
        numbered(), single_turn(engine).run, filters=[reject_listed("p1", "p2", "p4")]
    )
    result = finish(scheduler.collect(4, step=0))
    assert ids(result.groups) == ["p0", "p3", "p5", "p6"]
    assert result.stats.rejected == {"listed": 3}
    assert result.stats.started == 7
    assert result.stats.generated_tokens == 14


def test_leftovers_are_aborted_on_the_engine_and_offered_first_next_time() -> None:
    engine = ScriptedEngine(turns=lambda request: None if request.id in ("0/p1", "0/p4") else 2)
    scheduler = GenerateScheduler(numbered(), single_turn(engine).run, extra_prompts=2)
    first = finish(scheduler.collect(3, step=0))
    assert ids(first.groups) == ["p0", "p2", "p3"]
    assert [one.id for one in first.unused] == ["p1", "p4"]
    assert set(engine.aborted) == {"0/p1", "0/p4"}
    assert engine.running == {}
    assert first.stats.aborted == 2
    assert scheduler.state() == {"unused": ["p1", "p4"]}
    second = finish(scheduler.collect(5, step=1))
    assert engine.seen[5:7] == ["1/p1", "1/p4"]
    assert len(second.groups) == 5


def test_the_state_of_a_scheduler_goes_on_in_another_one() -> None:
    scheduler = GenerateScheduler(numbered(3), single_turn(ScriptedEngine()).run)
    scheduler.restore({"unused": ["p8", "p9"]}, find=prompt)
    assert scheduler.state() == {"unused": ["p8", "p9"]}
    assert ids(finish(scheduler.collect(3, step=0)).groups) == ["p8", "p9", "p0"]


def test_the_first_error_ends_the_collection_and_stops_the_others() -> None:
    engine = ScriptedEngine(
        turns=lambda request: 3 if number(request) == 2 else None,
        fails=lambda request: number(request) == 2,
    )
    scheduler = GenerateScheduler(numbered(), single_turn(engine).run)
    with pytest.raises(EngineError, match="engine died on 0/p2"):
        finish(scheduler.collect(5, step=0))
    assert engine.running == {}
    assert sorted(engine.aborted) == ["0/p0", "0/p1", "0/p3", "0/p4"]
    assert scheduler.state() == {"unused": ["p0", "p1", "p2", "p3", "p4"]}


def test_a_cancelled_collection_leaves_nothing_running_and_loses_no_prompt() -> None:
    engine = ScriptedEngine(turns=lambda request: None if number(request) else 1)
    scheduler = GenerateScheduler(numbered(), single_turn(engine).run)

    async def cancel_in_the_middle() -> None:
        task = asyncio.create_task(scheduler.collect(4, step=0))
        while not (len(engine.running) == 3 and len(engine.seen) == 4):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    finish(cancel_in_the_middle())
    assert engine.running == {}
    assert scheduler.state() == {"unused": ["p0", "p1", "p2", "p3"]}


def test_a_step_that_cannot_be_filled_says_what_was_tried_and_what_to_change() -> None:
    async def all_wrong(task: GroupTask) -> Group:
        return group(task.prompt.id, [0.0, 0.0])

    scheduler = GenerateScheduler(
        numbered(), all_wrong, filters=[equal_rewards], max_prompts_factor=2.5
    )
    with pytest.raises(RollError) as caught:
        finish(scheduler.collect(2, step=3))
    message = str(caught.value)
    assert "step 3 needs 2 groups of samples, tried 5 prompts (the limit)" in message
    assert "accepted 0; rejected: 5 x all rewards equal to 0" in message
    assert "rollout.max_prompts_factor (now 2.5)" in message


def test_a_finite_source_that_ends_early_says_so() -> None:
    scheduler = GenerateScheduler(numbered(2), single_turn(ScriptedEngine()).run)
    with pytest.raises(RollError, match=r"tried 2 prompts \(all that the data has\)"):
        finish(scheduler.collect(3, step=0))


def test_a_finite_source_fills_a_step_without_its_extra_prompts() -> None:
    scheduler = GenerateScheduler(numbered(3), single_turn(ScriptedEngine()).run, extra_prompts=2)
    assert len(finish(scheduler.collect(3, step=0)).groups) == 3


def test_a_prompt_that_comes_twice_in_a_step_gets_another_group_and_seed() -> None:
    again = itertools.repeat(prompt("p0"))
    result = finish(GenerateScheduler(again, single_turn(ScriptedEngine()).run).collect(3, step=2))
    found = [one.samples[0].sample for one in result.groups]
    assert [sample.group for sample in found] == ["2/p0", "2/p0+1", "2/p0+2"]
    assert len({sample.completion.tokens for sample in found}) == 3


def test_rewards_start_while_other_groups_still_generate() -> None:
    engine = ScriptedEngine(turns=lambda request: None if number(request) == 1 else 0)

    async def score_and_release(samples: list[Any]) -> list[Any]:
        for waiting in engine.running.values():
            waiting.set()
        raise EngineError("scored while another group was generating")

    scheduler = GenerateScheduler(numbered(), single_turn(engine, score=score_and_release).run)
    with pytest.raises(EngineError, match="scored while"):
        finish(scheduler.collect(2, step=0))


delays = st.lists(st.integers(0, 6), min_size=1, max_size=12)


@given(
    delays=delays,
    rejects=st.lists(st.booleans(), min_size=1, max_size=9).filter(lambda r: not all(r)),
    needs=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    extra=st.integers(0, 4),
    max_in_flight=st.integers(1, 8),
)
@settings(max_examples=80, deadline=None)
def test_every_prompt_is_accepted_rejected_or_handed_back_exactly_once(
    delays: list[int], rejects: list[bool], needs: list[int], extra: int, max_in_flight: int
) -> None:
    engine = ScriptedEngine(turns=lambda request: delays[crc32(request.id.encode()) % len(delays)])
    rejected: list[str] = []

    def reject(one: Group) -> str | None:
        if rejects[int(one.prompt.id[1:]) % len(rejects)]:
            rejected.append(one.prompt.id)
            return "scripted"
        return None

    source = numbered()
    scheduler = GenerateScheduler(
        source,
        single_turn(engine).run,
        filters=[reject],
        extra_prompts=extra,
        max_in_flight=max_in_flight,
        max_prompts_factor=100,
    )

    async def several_steps() -> list[CollectResult]:
        return [await scheduler.collect(n, step=i) for i, n in enumerate(needs)]

    results = finish(several_steps())
    assert [len(result.groups) for result in results] == needs
    accepted = [name for result in results for name in ids(result.groups)]
    books = Counter(accepted) + Counter(rejected) + Counter(scheduler.state()["unused"])
    taken = int(next(source).id[1:])
    assert books == Counter(f"p{i}" for i in range(taken))
    assert engine.peak <= min(max_in_flight, max(needs) + extra)
    assert engine.running == {}
    for result in results:
        stats = result.stats
        assert stats.started == len(result.groups) + stats.num_rejected + len(result.unused)
        assert len(result.unused) == stats.aborted + stats.surplus


@given(first=delays, second=delays, rejects=st.sets(st.integers(0, 12), max_size=6))
@settings(max_examples=30, deadline=None)
def test_without_extra_prompts_the_result_does_not_depend_on_timing(
    first: list[int], second: list[int], rejects: set[int]
) -> None:
    def collected(delays: list[int]) -> CollectResult:
        engine = ScriptedEngine(turns=lambda request: delays[number(request) % len(delays)])
        scheduler = GenerateScheduler(
            numbered(),
            single_turn(engine).run,
            filters=[reject_listed(*(f"p{i}" for i in rejects))],
        )
        return finish(scheduler.collect(6, step=0))

    one, other = collected(first), collected(second)
    assert [g.samples for g in one.groups] == [g.samples for g in other.groups]
    assert one.unused == other.unused == ()
    assert one.stats.started == other.stats.started


def test_a_source_that_raises_loses_no_prompt() -> None:
    def two_then_broken() -> Any:
        yield from (prompt("p0"), prompt("p1"))
        raise RollError("row 3 is broken")

    scheduler = GenerateScheduler(two_then_broken(), single_turn(ScriptedEngine()).run)
    with pytest.raises(RollError, match="row 3 is broken"):
        finish(scheduler.collect(3, step=0))
    assert scheduler.state() == {"unused": ["p0", "p1"]}
