"""`RayInspector`: inspection of processes on all nodes, by tasks of Ray."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.distributed.on_ray.members import Member
from roll.platform.processes import process_state


class RayInspector:
    """Inspection of processes by tasks of Ray. Apart from `ready`, which has a time limit, no
    method waits for a node: a node may answer late or never."""

    def is_here(self, member: Member) -> bool:
        """Return whether the actor's process is on this node, so that no task is needed."""
        assert member.info is not None, "only actors that have answered are looked at"
        return bool(member.info.node == ray.get_runtime_context().get_node_id())

    def look(self, member: Member) -> Any:
        """Start a task that inspects the actor's process on its node. Return the reference to the
        result: a `ProcessState`, or None if the process has ended."""
        assert member.info is not None, "only actors that have answered are looked at"
        there = NodeAffinitySchedulingStrategy(member.info.node, soft=False)
        task = ray.remote(num_cpus=0)(process_state).options(scheduling_strategy=there)
        return task.remote(member.info.pid)

    def ready(self, refs: Sequence[Any], timeout_s: float) -> Collection[Any]:
        """Wait at most `timeout_s` for the results of all references; return those with a
        result."""
        found, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        return list(found)

    def get(self, ref: Any) -> Any:
        """Return the result of a reference that `ready` returned.

        Raises:
            ray.exceptions.RayError: there is no result, because the actor or node is dead.
        """
        return ray.get(ref)
