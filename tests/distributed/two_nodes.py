"""A driver on a Ray cluster of two pretended nodes with two pretended GPUs each; prints JSON lines.

The cluster asks for a token, which the nodes and the driver take from a file. Run as a program
(`python -m tests.distributed.two_nodes FOLDER`), because it joins a Ray of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster as RayNodes

from roll.config.sections.placement import ClusterConfig
from roll.config.sections.reward import RewardConfig
from roll.config.sections.roles import Role
from roll.core.completion import Content
from roll.core.errors import ConfigError, RollError, WorkerError, WorkerLostError
from roll.distributed.cluster import Placement
from roll.distributed.on_ray.bundle_host import INLINE_BYTES
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.on_ray.token import use_token_of_cluster
from roll.distributed.processes.reaper import started
from roll.distributed.remote_contents import contents_here, living_nodes, node_of
from roll.rewards.contract import sample_of
from roll.runtime.reward_router import RewardCluster, RewardRouter
from roll.workers.reward import RewardWorker
from tests.distributed.small_workers import ROOT, Adder, Echo, NodeReward, Twin

SMALL = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 * 1024 * 1024}


def tell(**said: object) -> None:
    os.write(1, (json.dumps(said) + "\n").encode())


def take_token(path: Path) -> None:
    """What a person sets before `ray start`; the driver finds the file by its path alone."""
    path.write_text("an agreed secret of this cluster alone, which nobody can guess")
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)


def attempt(config: ClusterConfig, pools: dict[str, str]) -> str:
    """The error that this configuration meets."""
    try:
        with ResourceManager(config, pools):
            return "none"
    except RollError as error:
        return f"{type(error).__name__}: {error}"


def lose_tokens(config: ClusterConfig, nodes: RayNodes, second: object) -> None:
    """Let an engine on the second node write, end that node, and ask for what it has written."""
    far = Placement(Role.ACTOR_INFER, pool="far", per_worker=2, replaceable=True)
    with ResourceManager(config, {"far": "2-3"}, python_path=[ROOT]) as own:
        writer = own.start(Echo, far)

        async def write() -> Content:
            return (await writer.ask(0, Echo.write, (INLINE_BYTES // 8,)))[0].content

        fetched, content = asyncio.run(write()), asyncio.run(write())  # a fetch leaves a copy here
        (here,) = contents_here([fetched])
        tell(lives=node_of(content) in living_nodes(), tokens=len(here.tokens))
        nodes.remove_node(second)
        deadline = time.monotonic() + 60
        while node_of(content) in living_nodes() and time.monotonic() < deadline:
            time.sleep(0.1)
        try:
            contents_here([content])
        except WorkerError as error:
            tell(lives=node_of(content) in living_nodes(), lost=str(error))


def score(own: ResourceManager) -> None:
    """Let a pool of reward workers on all devices score samples that come one by one."""
    config = RewardConfig(worker="tests.distributed.small_workers:NodeReward", workers=4)
    place = Placement(Role.REWARD, pool="all", workers=config.workers, label="node")
    cluster = own.start(NodeReward, place, "node", config)
    cluster.call(RewardWorker.start)
    router = RewardRouter({"node": RewardCluster(config, cluster)})  # type: ignore[arg-type]
    router.begin_step({"default": 8.0})

    async def ask() -> list[float]:
        samples = [sample_of(str(number), answer="") for number in range(8)]
        groups = await asyncio.gather(*(router.score([one]) for one in samples))
        return [one.reward for group in groups for one in group]

    tell(scored_on=asyncio.run(ask()), failed=router.take_rates()["reward/node/error_rate"].value())


def lies_on_both(own: ResourceManager, folder: Path) -> None:
    """Start a worker with all devices of both nodes, let its second part fail, start the worker
    again, and kill its first part."""
    place = Placement(Role.ACTOR_INFER, pool="all", per_worker=4, replaceable=True)
    twin = own.start(Twin, place, folder)

    def parts() -> list[int]:
        (first,) = twin.call_each(Twin.where)
        second = pickle.loads((folder / "actor_infer[0].1").read_bytes())
        for pid, spec, visible in (first, second):
            told = {"part": spec.part, "node": spec.node, "devices": spec.devices}
            others = [[one.node, one.devices] for one in spec.parts]
            tell(**told, visible=visible, parts=others, meet=spec.rendezvous, alive=lives(pid))
        return [first[0], second[0]]

    def lives(pid: int) -> bool:
        return started(pid) is not None

    def gone(pid: int) -> bool:
        deadline = time.monotonic() + 60
        while lives(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        return not lives(pid)

    before = parts()
    tell(uses=len(twin.beside(Twin.usage).result(60)))
    waiting = twin.submit(Twin.never)
    (folder / "fail").touch()
    try:
        waiting.result(60)
    except WorkerLostError as error:
        tell(told=str(error), gone=[gone(pid) for pid in before], ranks=sorted(twin.lost))
    twin.restart(0)
    first, second = parts()
    os.kill(first, signal.SIGKILL)
    tell(gone=[gone(first), gone(second)])
    twin.close()
    try:
        own.start(Adder, place, 0)
    except ConfigError as error:
        tell(alone=str(error))


def main(folder: Path) -> None:
    take_token(folder / "auth_token")
    with use_token_of_cluster():
        nodes = RayNodes(initialize_head=True, head_node_args=SMALL)
        second = nodes.add_node(**SMALL)
    os.environ |= {"NCCL_IB_HCA": "mlx5", "HF_TOKEN": "t"}  # after Ray: its nodes do not have them
    try:
        joined = ClusterConfig(nodes=2, address=nodes.address, start_timeout_s=300)
        with ResourceManager(joined, {"all": "0-3", "far": "2-3"}, python_path=[ROOT]) as own:
            trainers = own.start(Adder, Placement(Role.ACTOR_TRAIN, pool="all"), 0)
            engine = own.start(Adder, Placement(Role.ACTOR_INFER, pool="far", per_worker=2), 0)
            for cluster in (trainers, engine):
                for _, spec, env in cluster.call_each(Adder.where):
                    visible = env["CUDA_VISIBLE_DEVICES"]
                    tell(rank=spec.rank, node=spec.node, devices=spec.devices, visible=visible)
                    tell(hca=env["NCCL_IB_HCA"], token=env["HF_TOKEN"])
            score(own)
            lies_on_both(own, folder)
        missing = joined.model_copy(update={"nodes": 3, "start_timeout_s": 2.0})
        tell(error=attempt(missing, {"all": "0"}))
        tell(error=attempt(joined, {"all": "0-4"}))
        lose_tokens(joined, nodes, second)
        (folder / "auth_token").write_text("what a stranger may take for the secret of the cluster")
        tell(error=attempt(joined, {"all": "0"}))
        (folder / "auth_token").unlink()
        tell(error=attempt(joined, {"all": "0"}))
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
