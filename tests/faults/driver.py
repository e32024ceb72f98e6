"""A driver to be killed: two workers, one with a grandchild nobody owns; busy until a signal comes.

Run as `python -m tests.faults.driver <mode>`; prints `ready <pids>` when all is up. Modes: `sleep`
waits in a call, `end` ends normally, `raise` ends with an exception.
"""

from __future__ import annotations

import os
import sys

from roll.config.sections.placement import ClusterConfig
from roll.config.sections.roles import Role
from roll.distributed.cluster import Placement
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.processes.shutdown import Terminated, orderly_end
from tests.distributed.small_workers import ROOT, Adder, Echo


def main(mode: str) -> None:
    cluster = ClusterConfig(platform="cpu", devices_per_node=2, start_timeout_s=300)
    with orderly_end() as cleanups:
        resources = ResourceManager(cluster, {"all": "0"}, python_path=[ROOT])
        cleanups.enter_context(resources)
        adder = resources.start(Adder, Placement(Role.ACTOR_TRAIN, pool="all"), 0)
        resources.start(Echo, Placement(Role.ACTOR_INFER, pool="all"))
        grandchild = adder.call(Adder.spawn_grandchild)
        os.write(1, f"ready {adder.infos[0].pid} {grandchild}\n".encode())
        if mode == "sleep":
            adder.call(Adder.sleep, (600.0,))
        if mode == "raise":
            raise RuntimeError("the driver broke")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Terminated as ended:
        sys.exit(128 + ended.signum)
