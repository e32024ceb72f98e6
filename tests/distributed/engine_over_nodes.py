"""A driver on a Ray cluster of two nodes with one CPU slot each, and one vLLM engine over both;
prints JSON lines. Run as a program (`python -m tests.distributed.engine_over_nodes FOLDER`)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from ray.cluster_utils import Cluster as RayNodes
from transformers import AutoModelForCausalLM, PreTrainedModel

from roll.config.sections.engines import VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.placement import ClusterConfig
from roll.config.sections.roles import Role
from roll.config.sections.training import InferRole
from roll.core.errors import WorkerLostError
from roll.core.types import GenerateRequest, SamplingParams
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.on_ray.token import use_token_of_cluster
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import send
from roll.weight_sync.transport_choice import choose_transport, new_channel
from roll.workers.infer import InferWorker
from tests.contract.engine_rig import is_gone, shake, weights_of
from tests.distributed.small_workers import ROOT
from tests.distributed.two_nodes import take_token
from tests.tiny import save_tiny_model

SMALL = {"num_cpus": 2, "object_store_memory": 100 * 1024 * 1024}
PROMPT = (5, 17, 9, 30, 22, 8)
TOKENS = 24
LIMIT_S = 900
"""Time limit of the start, in seconds. Five interpreters import vLLM, a minute of computing time,
and a machine that runs other tests may give them a tenth of its time."""
MARK = "HF_MARK_OF_THIS_TEST"
"""Variable that actors take over, and with them vLLM's processes."""


def tell(**said: object) -> None:
    os.write(1, (json.dumps(said) + "\n").encode())


def greedy(model: PreTrainedModel) -> list[int]:
    """What Hugging Face writes."""
    written = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None
    )
    return [int(token) for token in written[0, len(PROMPT) :]]


def generated(engine: Cluster[InferWorker]) -> list[int]:
    """What the engine writes."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True)
    request = GenerateRequest(f"at-{time.monotonic()}", PROMPT, sampling, 1, 0, None)
    (written,) = engine.call_each(InferWorker.generate, request)
    return [int(token) for token in written[0].tokens]


def push(engine: Cluster[InferWorker], model: PreTrainedModel, version: int) -> None:
    """Send weights to both processes, by the transport that a run would choose."""
    (places,) = engine.call_each(InferWorker.places)
    route = choose_transport("cpu", [places[0]], places)
    tensors = weights_of(model)
    channel = new_channel(
        route.kind, num_receivers=len(places), timeout_s=60, collective=route.collective
    )
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, channel, iter(tensors), Manifest.of(tensors), verify=True)
        engine.call(InferWorker.load_weights, channel, version, {0: 0}, True)
        sending.result(timeout=60)
    tell(route=route.kind, nodes=[place.node for place in places])


def processes_of_vllm() -> dict[str, psutil.Process]:
    """The scheduler and the ranks of this program's engine, by their titles."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if "VLLM::" in title and process.environ().get(MARK) == str(os.getpid()):
                found[title.strip()] = process
    return found


def main(folder: Path) -> None:
    path = save_tiny_model(folder / "model", tied=False)
    oracle = AutoModelForCausalLM.from_pretrained(path)
    os.environ[MARK] = str(os.getpid())
    take_token(folder / "auth_token")
    with use_token_of_cluster():
        nodes = RayNodes(initialize_head=True, head_node_args=SMALL)
        nodes.add_node(**SMALL)
    role = InferRole(pool="all", strategy=VllmConfig(tp=2, max_num_seqs=4))
    model = ModelConfig(path=str(path), dtype="float32")
    place = Placement(Role.ACTOR_INFER, pool="all", per_worker=2, replaceable=True)
    cluster = ClusterConfig(
        platform="cpu", nodes=2, devices_per_node=1, address=nodes.address, start_timeout_s=LIMIT_S
    )
    try:
        with ResourceManager(cluster, {"all": "0-1"}, python_path=[ROOT]) as own:
            engine = own.start(InferWorker, place, role, model, 64)
            engine.submit(InferWorker.start).result(LIMIT_S)
            tell(same=generated(engine) == greedy(oracle))
            before = generated(engine)
            shake(oracle, seed=1)
            push(engine, oracle, 1)
            tell(same=generated(engine) == greedy(oracle), changed=generated(engine) != before)
            engine.call(InferWorker.sleep)
            engine.call(InferWorker.wake)
            beat = asyncio.run(engine.ask(0, InferWorker.heartbeat))
            tell(same=generated(engine) == greedy(oracle), version=beat.version)
            ours = processes_of_vllm()
            ours["VLLM::Worker_TP1"].kill()
            try:
                while True:
                    generated(engine)
            except WorkerLostError as error:
                tell(lost=str(error))
        psutil.wait_procs(list(ours.values()), 30)  # the reapers of killed actors may be at work
        tell(count=len(ours), left=[name for name, one in ours.items() if not is_gone(one)])
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
