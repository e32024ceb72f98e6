"""The scheduler over scripted engines: bounds, replacement, aborts, errors, and exact books."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.completion import Written
from roll.core.errors import EngineError, RollError
from roll.core.types import GenerateRequest, Sample
from roll.data.datasets import Dataset, Source
from roll.data.mixing import Sampler
from roll.distributed.remote_values import RemoteValue
from roll.rollout.budget import Budget
from roll.rollout.filters import equal_rewards
from roll.rollout.scheduler import CollectResult, GenerateScheduler
from roll.rollout.serialization import from_plain, to_plain
from roll.rollout.types import Group, GroupTask
from tests.fakes import (
    Prompts,
    ScriptedEngine,
    completion,
    from_disk,
    group,
    prompt,
    scheduler,
    single_turn,
)

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


def books(of: GenerateScheduler) -> Prompts:
    assert isinstance(of.prompts, Prompts)
    return of.prompts


def ids(groups: list[Group]) -> list[str]:
    return [one.prompt.id for one in groups]


def reject_listed(*names: str) -> Any:
    return lambda one: "listed" if one.prompt.id in names else None


def test_groups_come_back_in_the_order_of_their_prompts_whoever_ends_first() -> None:
    engine = ScriptedEngine(turns=lambda request: 50 - 5 * number(request))
    result = finish(scheduler(numbered(), single_turn(engine).run, groups=8).collect(0))
    assert ids(result.groups) == [f"p{i}" for i in range(8)]
    assert result.unused == ()
    assert engine.aborted == []


def test_no_more_groups_run_at_once_than_allowed() -> None:
    engine = ScriptedEngine(turns=lambda request: 3)
    finish(scheduler(numbered(), single_turn(engine).run, groups=10, max_in_flight=3).collect(0))
    assert engine.peak == 3


def test_a_rejected_group_is_replaced_by_the_next_prompt() -> None:
    engine = ScriptedEngine(turns=lambda request: number(request) % 4)
    made = scheduler(numbered(), single_turn(engine).run, filters=[reject_listed("p1", "p2", "p4")])
    result = finish(made.collect(0))
    assert ids(result.groups) == ["p0", "p3", "p5", "p6"]
    assert result.stats.rejected == {"listed": 3}
    assert result.stats.begun == 7
    assert result.stats.generated_tokens == 14
    assert books(made).replaced == ["p1", "p2", "p4"]


def test_leftovers_are_aborted_on_the_engine_and_offered_first_next_time() -> None:
    engine = ScriptedEngine(turns=lambda request: None if request.id in ("0/p1", "0/p4") else 2)
    made = scheduler(numbered(), single_turn(engine).run, groups=3, extra=2)

    async def two_steps() -> None:
        first = await made.collect(0)
        assert ids(first.groups) == ["p0", "p2", "p3"]
        assert [one.id for one in first.unused] == ["p1", "p4"]
        assert set(engine.aborted) == {"0/p1", "0/p4"}
        assert engine.running == {}
        assert first.stats.aborted == 2
        assert books(made).offered == ["p1", "p4"]
        second = await made.collect(1)
        assert engine.seen[5:7] == ["1/p1", "1/p4"]
        assert len(second.groups) == 3

    finish(two_steps())


def test_the_first_error_ends_the_collection_and_stops_the_others() -> None:
    engine = ScriptedEngine(
        turns=lambda request: 3 if number(request) == 2 else None,
        fails=lambda request: number(request) == 2,
    )
    made = scheduler(numbered(), single_turn(engine).run, groups=5)
    with pytest.raises(EngineError, match="engine died on 0/p2"):
        finish(made.collect(0))
    assert engine.running == {}
    assert sorted(engine.aborted) == ["0/p0", "0/p1", "0/p3", "0/p4"]
    assert books(made).offered == ["p0", "p1", "p2", "p3", "p4"]


def test_a_group_that_ends_by_a_cancellation_of_its_own_is_an_error() -> None:
    """As of a task that the code of the group has cancelled, and then awaits."""
    engine = ScriptedEngine(turns=lambda request: None)
    plain = single_turn(engine).run

    async def run(task: GroupTask) -> Group:
        if task.prompt.id != "p1":
            return await plain(task)
        other = asyncio.ensure_future(asyncio.sleep(60))
        other.cancel()
        await other
        raise AssertionError

    made = scheduler(numbered(), run, groups=3)
    with pytest.raises(RollError, match="group of prompt 'p1' ended by a CancelledError"):
        finish(made.collect(0))
    assert engine.running == {}
    assert books(made).offered == ["p0", "p1", "p2"]


def test_a_cancelled_collection_leaves_nothing_running_and_loses_no_prompt() -> None:
    engine = ScriptedEngine(turns=lambda request: None if number(request) else 1)
    made = scheduler(numbered(), single_turn(engine).run)

    async def cancel_in_the_middle() -> None:
        task = asyncio.create_task(made.collect(0))
        while not (len(engine.running) == 3 and len(engine.seen) == 4):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    finish(cancel_in_the_middle())
    assert engine.running == {}
    assert books(made).offered == ["p0", "p1", "p2", "p3"]


def test_a_step_that_cannot_be_filled_says_what_was_tried_and_what_to_change() -> None:
    async def all_wrong(task: GroupTask) -> Group:
        return group(task.prompt.id, [0.0, 0.0])

    made = scheduler(
        numbered(), all_wrong, groups=2, filters=[equal_rewards], max_prompts_factor=2.5
    )
    with pytest.raises(RollError) as caught:
        finish(made.collect(3))
    message = str(caught.value)
    assert "step 3 needs 2 groups of samples; it accepted 0" in message
    assert "rejected 4 (the limit): 4 x all rewards equal to 0" in message
    assert "rollout.max_prompts_factor (now 2.5)" in message
    assert message.endswith(
        "The limit is 3 rejected groups: 5 tried, which is 2.5 times 2, less the 2 that are needed"
    )


@given(groups=st.integers(1, 50), factor=st.floats(1, 9), staleness=st.integers(0, 5))
def test_the_limit_of_rejected_groups_follows_from_what_its_message_says(
    groups: int, factor: float, staleness: int
) -> None:
    budget = Budget(groups, staleness, max_prompts_factor=factor)
    over = budget.max_rejected + 1
    told = str(budget.gave_up(step=0, ready=0, rejected={"hard": over})).rpartition("The limit")[2]
    limit, tried, *_, needed = [
        int(n) for n in re.findall(r"\b\d+(?= rejected| tried| that)", told)
    ]
    steps = int(match[1]) if (match := re.search(r"each of (\d+) steps", told)) else 1
    assert steps == staleness + 1
    assert limit == (tried - needed) * steps == over - 1
    assert tried == math.ceil(factor * groups)


def test_a_finite_source_that_ends_early_says_so() -> None:
    made = scheduler(numbered(2), single_turn(ScriptedEngine()).run, groups=3)
    with pytest.raises(RollError, match=r"accepted 2 and rejected 0 \(all that the data has\)"):
        finish(made.collect(0))


def test_a_finite_source_fills_a_step_without_its_extra_prompts() -> None:
    made = scheduler(numbered(3), single_turn(ScriptedEngine()).run, groups=3, extra=2)
    assert len(finish(made.collect(0)).groups) == 3


def test_a_prompt_that_comes_twice_in_a_step_gets_another_group_and_seed() -> None:
    again = itertools.repeat(prompt("p0"))
    result = finish(scheduler(again, single_turn(ScriptedEngine()).run, groups=3).collect(2))
    found = [one.samples[0].sample for one in result.groups]
    assert [sample.group for sample in found] == ["2/p0", "2/p0+1", "2/p0+2"]
    assert len({tuple(sample.completion.tokens) for sample in found}) == 3


def test_rewards_start_while_other_groups_still_generate() -> None:
    engine = ScriptedEngine(turns=lambda request: None if number(request) == 1 else 0)

    async def score_and_release(samples: list[Any]) -> list[Any]:
        for waiting in engine.running.values():
            waiting.set()
        raise EngineError("scored while another group was generating")

    made = scheduler(numbered(), single_turn(engine, score=score_and_release).run, groups=2)
    with pytest.raises(EngineError, match="scored while"):
        finish(made.collect(0))


delays = st.lists(st.integers(0, 6), min_size=1, max_size=12)


@given(
    delays=delays,
    rejects=st.lists(st.booleans(), min_size=1, max_size=9).filter(lambda r: not all(r)),
    groups=st.integers(1, 5),
    steps=st.integers(1, 4),
    extra=st.integers(0, 4),
    max_in_flight=st.integers(1, 8),
    max_staleness=st.integers(0, 3),
    pauses=st.lists(st.integers(0, 8), min_size=4, max_size=4),
)
@settings(max_examples=120)
def test_every_prompt_is_accepted_rejected_or_put_back_exactly_once(
    delays: list[int],
    rejects: list[bool],
    groups: int,
    steps: int,
    extra: int,
    max_in_flight: int,
    max_staleness: int,
    pauses: list[int],
) -> None:
    engine = ScriptedEngine(turns=lambda request: delays[crc32(request.id.encode()) % len(delays)])
    rejected: list[str] = []

    def reject(one: Group) -> str | None:
        if rejects[int(one.prompt.id[1:]) % len(rejects)]:
            rejected.append(one.prompt.id)
            return "scripted"
        return None

    made = scheduler(
        numbered(),
        single_turn(engine).run,
        groups=groups,
        filters=[reject],
        extra=extra,
        max_in_flight=max_in_flight,
        max_staleness=max_staleness,
        max_prompts_factor=100,
    )

    async def several_steps() -> list[CollectResult]:
        results = []
        for step in range(steps):
            results.append(await made.collect(step))
            if max_staleness == 0:
                assert engine.running == {}
            for _ in range(pauses[step]):  # the driver trains
                await asyncio.sleep(0)
        await made.close()
        return results

    results = finish(several_steps())
    assert [len(result.groups) for result in results] == [groups] * steps
    accepted = [name for result in results for name in ids(result.groups)]
    assert Counter(accepted) == Counter(books(made).settled)
    assert Counter(rejected) == Counter(books(made).replaced)
    found = Counter(accepted) + Counter(rejected) + Counter(books(made).offered)
    assert found == Counter(f"p{i}" for i in range(books(made).taken))
    assert engine.peak <= min(max_in_flight, (max_staleness + 1) * groups + extra)
    assert engine.running == {}
    for step, result in enumerate(results):
        assert len(result.unused) == result.stats.aborted + result.stats.surplus
        for one in result.groups:
            assert 0 <= step - one.step <= max_staleness


@given(first=delays, second=delays, rejects=st.sets(st.integers(0, 12), max_size=6))
@settings(max_examples=30)
def test_without_extra_prompts_the_result_does_not_depend_on_timing(
    first: list[int], second: list[int], rejects: set[int]
) -> None:
    def collected(delays: list[int]) -> CollectResult:
        engine = ScriptedEngine(turns=lambda request: delays[number(request) % len(delays)])
        made = scheduler(
            numbered(),
            single_turn(engine).run,
            groups=6,
            filters=[reject_listed(*(f"p{i}" for i in rejects))],
        )
        return finish(made.collect(0))

    one, other = collected(first), collected(second)
    assert [g.samples for g in one.groups] == [g.samples for g in other.groups]
    assert one.unused == other.unused == ()
    assert one.stats.begun == other.stats.begun


def test_a_source_that_raises_loses_no_prompt() -> None:
    def two_then_broken() -> Any:
        yield from (prompt("p0"), prompt("p1"))
        raise RollError("row 3 is broken")

    made = scheduler(two_then_broken(), single_turn(ScriptedEngine()).run, groups=3)
    with pytest.raises(RollError, match="row 3 is broken"):
        finish(made.collect(0))
    assert books(made).offered == ["p0", "p1"]


def test_groups_for_later_steps_are_generated_while_the_driver_trains() -> None:
    engine = ScriptedEngine(turns=lambda request: 3)
    made = scheduler(numbered(), single_turn(engine).run, groups=2, max_staleness=1)

    async def train_between() -> list[int]:
        first = await made.collect(0)
        for _ in range(30):
            await asyncio.sleep(0)
        waiting = made.buffer.ready
        second = await made.collect(1)
        await made.close()
        return [waiting, *(one.step for one in (*first.groups, *second.groups))]

    assert finish(train_between()) == [2, 0, 0, 0, 0]
    assert engine.seen[:4] == ["0/p0", "0/p1", "0/p2", "0/p3"]


def test_a_step_waits_for_a_group_that_would_be_too_old_for_the_next() -> None:
    engine = ScriptedEngine(turns=lambda request: 40 if number(request) == 0 else 1)
    made = scheduler(numbered(), single_turn(engine).run, groups=2, max_staleness=1)

    async def three_steps() -> list[list[str]]:
        taken = [ids((await made.collect(step)).groups) for step in range(3)]
        await made.close()
        return taken

    # p0 is passed over once, and then waited for: at step 2 it would be two versions old.
    assert finish(three_steps()) == [["p1", "p2"], ["p0", "p3"], ["p4", "p5"]]


def test_with_extra_prompts_a_group_that_is_too_slow_is_given_back_instead() -> None:
    engine = ScriptedEngine(turns=lambda request: None if request.id == "0/p0" else 1)
    made = scheduler(numbered(), single_turn(engine).run, groups=2, max_staleness=1, extra=1)

    async def two_steps() -> list[CollectResult]:
        results = [await made.collect(step) for step in range(2)]
        await made.close()
        return results

    results = finish(two_steps())
    assert results[0].unused == ()
    assert [one.id for one in results[1].unused][:1] == ["p0"]
    assert "0/p0" in engine.aborted


def test_an_error_between_two_steps_is_raised_by_the_next_one() -> None:
    engine = ScriptedEngine(turns=lambda request: 5, fails=lambda request: number(request) == 3)
    made = scheduler(numbered(), single_turn(engine).run, groups=2, max_staleness=1)

    async def two_steps() -> None:
        await made.collect(0)
        for _ in range(30):
            await asyncio.sleep(0)
        await made.collect(1)

    with pytest.raises(EngineError, match="engine died on 0/p3"):
        finish(two_steps())
    assert engine.running == {}


async def stopped_after_one_step(made: GenerateScheduler) -> dict[str, Any]:
    """The state of a scheduler, closed when the groups of later steps have had their time."""
    await made.collect(0)
    for _ in range(30):
        await asyncio.sleep(0)
    state = made.state()
    await made.close()
    return state


def test_what_waits_and_what_runs_goes_on_in_another_scheduler(tmp_path: Path) -> None:
    def stuck(request: GenerateRequest) -> int | None:
        return None if number(request) == 3 else 1

    engine = ScriptedEngine(turns=stuck)
    made = scheduler(numbered(), single_turn(engine).run, groups=2, max_staleness=1)

    state = from_disk(finish(stopped_after_one_step(made)), tmp_path)
    assert state["running"] == ["p3"]
    made_again = scheduler(
        iter([prompt(f"p{i}") for i in range(4, 99)]), single_turn(ScriptedEngine()).run,
        groups=2, max_staleness=1,
    )  # fmt: skip
    made_again.restore(state, find=prompt)
    assert made_again.buffer.ready == 1

    async def second_step() -> list[Group]:
        result = await made_again.collect(1)
        await made_again.close()
        return result.groups

    assert [(one.prompt.id, one.step) for one in finish(second_step())] == [("p2", 0), ("p3", 1)]


def test_what_waits_is_given_back_where_a_resumed_run_would_not_make_it(tmp_path: Path) -> None:
    """It allows less staleness, or groups of another size; neither is trained on."""
    engine = ScriptedEngine()
    made = scheduler(numbered(), single_turn(engine).run, groups=2, max_staleness=2)

    state = from_disk(finish(stopped_after_one_step(made)), tmp_path)
    waiting = [row["group"]["prompt"] for row in state["waiting"]]
    assert {"p2", "p3"} <= set(waiting)
    size = len(state["waiting"][0]["group"]["samples"])

    def taken(max_staleness: int, samples: int) -> list[tuple[str, int]]:
        again = scheduler(
            iter([prompt(f"p{i}") for i in range(50, 99)]), single_turn(ScriptedEngine()).run,
            groups=2, max_staleness=max_staleness,
        )  # fmt: skip
        again.restore(state, find=prompt, fits=lambda group: len(group.samples) == samples)

        async def step() -> list[Group]:
            result = await again.collect(1)
            await again.close()
            return result.groups

        return [(one.prompt.id, one.step) for one in finish(step())]

    assert taken(2, size) == [("p2", 0), ("p3", 0)]
    assert [step for _, step in taken(0, size)] == [1, 1]
    assert [step for _, step in taken(2, size + 1)] == [1, 1]


def on_a_node(one: Group, node: str, *, baseline: bool = False) -> Group:
    """The same group of one sample, with its tokens elsewhere; or those of its baseline."""
    (scored,) = one.samples
    if baseline:
        return replace(one, baseline=on_a_node(one, node).samples[0])
    content: RemoteValue[Written] = RemoteValue([scored.sample.completion.content.get()], node=node)
    completion = replace(scored.sample.completion, content=content)
    sample = replace(scored.sample, completion=completion)
    return replace(one, samples=(replace(scored, sample=sample),))


def test_groups_whose_tokens_are_lost_with_their_node_begin_again() -> None:
    """Prompts p0 to p2; what p1 got first is on a node that is dead when the step takes it."""
    tries: Counter[str] = Counter()

    async def elsewhere(task: GroupTask) -> Group:
        tries[task.prompt.id] += 1
        node = "dead" if tries["p1"] == 1 and task.prompt.id == "p1" else "alive"
        return on_a_node(group(task.prompt.id, [1.0], step=task.step), node)

    async def collected() -> list[str]:
        made = scheduler(numbered(10), elsewhere, groups=3)
        made.living_nodes = lambda: ["alive", "another"]
        result = await made.collect(0)
        assert len(made.buffer) == 0
        await made.close()
        return [one.prompt.id for one in result.groups]

    assert sorted(finish(collected())) == ["p0", "p1", "p2"]
    assert tries == {"p0": 1, "p1": 2, "p2": 1}


@pytest.mark.parametrize("baseline", [False, True])
def test_lost_groups_that_wait_begin_again_before_the_state_is_saved(baseline: bool) -> None:
    """Of p0 to p3, two are for the step after; p3 waits on a node that dies."""

    async def elsewhere(task: GroupTask) -> Group:
        one = group(task.prompt.id, [1.0], step=task.step)
        return on_a_node(one, task.prompt.id, baseline=baseline)

    async def saved() -> tuple[list[str], list[str]]:
        made = scheduler(numbered(4), elsewhere, groups=2, max_staleness=1)
        made.living_nodes = lambda: ["p0", "p1", "p2"]
        await made.collect(0)
        await asyncio.sleep(0.05)
        await made.begin_lost_again()
        state = made.state()
        await made.close()
        return state["running"], [row["group"]["prompt"] for row in state["waiting"]]

    assert finish(saved()) == (["p3"], ["p2"])


def test_a_saved_group_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    one = group(
        "s:0", [0.1, 1 / 3], completions=[completion(5, 6, version=2), completion(7)], step=4
    )
    assert from_plain(from_disk(to_plain(one), tmp_path), prompt) == one
    by_turns = replace(one, samples=tuple(replace(s, turn_reward=0.5) for s in one.samples))
    assert from_plain(from_disk(to_plain(by_turns), tmp_path), prompt) == by_turns


def test_a_saved_episode_has_the_words_with_which_it_began(tmp_path: Path) -> None:
    one = group("s:0", [0.1], completions=[completion(5, 6)])
    (scored,) = one.samples
    own = replace(scored.sample.prompt, tokens=(7, 8, 9), text="You are on a lake.")
    sample = Sample(scored.sample.id, scored.sample.group, own, scored.sample.completion)
    episode = replace(one, samples=(replace(scored, sample=sample),))
    found = from_plain(from_disk(to_plain(episode), tmp_path), prompt)
    assert found == episode
    assert found.prompt.tokens != found.samples[0].sample.prompt.tokens == (7, 8, 9)


def test_a_group_of_an_older_checkpoint_is_read() -> None:
    one = group("s:0", [0.1], completions=[completion(5, 6, version=2)], step=4)
    row = to_plain(one)
    (sample,) = row["samples"]
    for new in ("written", "runs", "finish"):
        del sample[new]
    sample["text"] = one.samples[0].sample.response_text
    numbers = {"tokens": [5, 6], "logprobs": [-0.5, -0.5], "finish": "stop"}
    for versions in ({"versions": [2, 2]}, {"runs": [[2, 2]]}):
        sample["completion"] = numbers | versions
        assert from_plain(row, prompt) == one


def test_a_rejected_group_is_replaced_by_one_of_its_own_source() -> None:
    sources = tuple(
        Source(name, 1.0, tuple(prompt(f"{name}:{i}") for i in range(50)))
        for name in ("easy", "hard")
    )
    sampler = Sampler(Dataset(sources, (), "f"), seed=0)

    async def hard_ones_fail_often(task: GroupTask) -> Group:
        hard = task.prompt.source == "hard"
        return group(task.prompt.id, [0.0, 0.0 if hard and hash(task.prompt.id) % 3 else 1.0])

    made = GenerateScheduler(
        sampler, hard_ones_fail_often, Budget(6, max_prompts_factor=50), [equal_rewards]
    )

    async def several_steps() -> list[Counter[str]]:
        return [
            Counter(one.prompt.source for one in (await made.collect(step)).groups)
            for step in range(4)
        ]

    assert finish(several_steps()) == [Counter(easy=3, hard=3)] * 4
