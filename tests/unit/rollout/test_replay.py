"""The books of groups: how many may begin, how long they took, and that the books stay small."""

from __future__ import annotations

import asyncio
import pickle

from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.budget import Budget
from roll.rollout.collect_stats import CollectCounts, CollectStats
from roll.rollout.replay import ReplayBuffer
from roll.rollout.types import GroupTiming
from tests.fakes import group, prompt


def size_after(steps: int) -> int:
    """Bytes of a buffer of staleness 1 that accepted, rejected, kept and gave back in each step."""
    buffer = ReplayBuffer(max_staleness=1)
    for version in range(steps):
        accepted = buffer.begin(prompt("a"), version)
        rejected = buffer.begin(prompt("b"), version)
        aborted = buffer.begin(prompt("c"), version)
        assert (buffer.running, buffer.due(version)) == (3, 0)
        assert buffer.due(version + 1) == 3
        buffer.accept(accepted, group("a", [1.0]))
        buffer.remove(rejected)
        buffer.keep(group("d", [0.0]), version)
        assert (buffer.running, buffer.ready) == (1, 2)
        buffer.remove(aborted)
        for entry in list(buffer.entries()):
            buffer.remove(entry)
        assert (len(buffer), buffer.running, buffer.ready) == (0, 0, 0)
    return len(pickle.dumps(buffer))


def test_a_buffer_is_as_small_after_a_thousand_steps_as_after_ten() -> None:
    assert abs(size_after(1000) - size_after(10)) < 8


@given(
    groups=st.integers(1, 4),
    staleness=st.integers(0, 3),
    extra=st.integers(0, 3),
    limit=st.integers(1, 12),
    ahead=st.integers(0, 4),
    ended=st.integers(0, 8),
    running=st.integers(0, 12),
)
def test_as_many_groups_begin_as_are_trained_on_in_time(
    groups: int, staleness: int, extra: int, limit: int, ahead: int, ended: int, running: int
) -> None:
    budget = Budget(groups, staleness, extra, max_in_flight=limit)
    # Steps after the present version that train on the group at each place.
    in_time = sum(ahead + place // groups <= staleness for place in range(100))
    wanted = in_time + extra - (ended + running) if in_time else 0
    found = budget.may_begin(outstanding=ended + running, running=running, ahead=ahead)
    assert found == max(0, min(wanted, limit - running))


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 5), st.integers(0, 50)),
        max_size=5,
    ),
    st.integers(0, 12),
)
def test_times_of_groups_that_overlap_count_once(
    groups: list[tuple[int, int, int, int]], since_s: int
) -> None:
    """Against the seconds, one by one, in which a group is generated or scored."""
    counts = CollectCounts(since_s)
    generated, scored = set[int](), set[int]()
    for start, generate_s, score_s, tokens in groups:
        middle = start + generate_s
        counts.ended.append((GroupTiming(start, middle, middle + score_s), tokens))
        generated |= set(range(start, middle))
        scored |= set(range(middle, middle + score_s))
    counts.ended.append((None, 7))  # a group of an older checkpoint

    async def stats() -> CollectStats:
        return counts.stats(aborted=2, surplus=3)

    found = asyncio.run(stats())
    assert found.generate_s == sum(second >= since_s for second in generated)
    assert found.reward_s == sum(second >= since_s for second in scored)
    assert found.generated_tokens == 7 + sum(tokens for *_, tokens in groups)
    assert found.metrics().values_by_name()["rollout/aborted_groups"] == 5


def test_rejected_groups_are_counted_by_reason_and_by_tag() -> None:
    counts = CollectCounts(0.0, begun=9)
    counts.rejected.update({"all rewards equal to 1": 2, "mean reward at most 0": 1})
    counts.rejected_by_tag["math"] += 3

    async def stats() -> CollectStats:
        return counts.stats(aborted=0, surplus=0)

    found = asyncio.run(stats())
    told = found.metrics().values_by_name()
    assert (told["rollout/started_groups"], told["rollout/rejected_groups"]) == (9, 3)
    assert found.tag_metrics(["math", "code"]).values_by_name() == {
        "tag/code/rejected_groups": 0,
        "tag/math/rejected_groups": 3,
    }
