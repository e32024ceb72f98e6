"""The books of groups: what they hold does not grow with the steps of a run."""

from __future__ import annotations

import pickle

from roll.rollout.replay import ReplayBuffer
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
