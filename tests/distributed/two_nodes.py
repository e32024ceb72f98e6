"""A driver on a Ray cluster of two pretended nodes with two pretended GPUs each; prints JSON lines.

Run as a program (`python -m tests.distributed.two_nodes`), because it joins a Ray of its own.
"""

from __future__ import annotations

import json
import os

from ray.cluster_utils import Cluster as RayNodes

from roll.config.placement import ClusterConfig
from roll.config.roles import Role
from roll.core.errors import RollError
from roll.distributed.cluster import Placement
from roll.distributed.resources import ResourceManager
from tests.distributed.small_workers import ROOT, Adder

SMALL = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 * 1024 * 1024}


def tell(**said: object) -> None:
    os.write(1, (json.dumps(said) + "\n").encode())


def attempt(config: ClusterConfig, pools: dict[str, str]) -> str:
    """The error that this configuration meets."""
    try:
        with ResourceManager(config, pools):
            return "none"
    except RollError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    nodes = RayNodes(initialize_head=True, head_node_args=SMALL)
    nodes.add_node(**SMALL)
    try:
        joined = ClusterConfig(nodes=2, address=nodes.address, start_timeout_s=60)
        with ResourceManager(joined, {"all": "0-3", "far": "2-3"}, python_path=[ROOT]) as own:
            trainers = own.start(Adder, Placement(Role.ACTOR_TRAIN, pool="all"), 0)
            engine = own.start(Adder, Placement(Role.ACTOR_INFER, pool="far", per_worker=2), 0)
            for cluster in (trainers, engine):
                for _, spec, env in cluster.call_each(Adder.where):
                    visible = env["CUDA_VISIBLE_DEVICES"]
                    tell(rank=spec.rank, node=spec.node, devices=spec.devices, visible=visible)
        missing = joined.model_copy(update={"nodes": 3, "start_timeout_s": 2.0})
        tell(error=attempt(missing, {"all": "0"}))
        tell(error=attempt(joined, {"all": "0-4"}))
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main()
