"""`RayLooks`: what is going on in processes of all nodes, as references that Ray answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll.distributed.on_ray.members import Member
from roll.platform.processes import look_at


class RayLooks:
    """Used by one thread, which nothing here holds up: a node may answer late or never."""

    def is_here(self, member: Member) -> bool:
        """Whether its process is on this machine, and can be looked at directly."""
        assert member.info is not None, "only actors that have answered are looked at"
        return bool(member.info.node == ray.get_runtime_context().get_node_id())

    def look(self, member: Member) -> Any:
        """Reference to a `Look` at its process on another node, None if that is gone."""
        assert member.info is not None, "only actors that have answered are looked at"
        there = NodeAffinitySchedulingStrategy(member.info.node, soft=False)
        task = ray.remote(num_cpus=0)(look_at).options(scheduling_strategy=there)
        return task.remote(member.info.pid)

    def ready(self, refs: Sequence[Any], timeout_s: float) -> Collection[Any]:
        """Those that have their answer, as soon as all have or `timeout_s` is over."""
        found, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
        return list(found)

    def get(self, ref: Any) -> Any:
        """The answer of one that is `ready`.

        Raises:
            ray.exceptions.RayError: there is none; who should have given it is gone.
        """
        return ray.get(ref)
