"""Benchmark of the speed of a weight push to the engines, by transport and phase.

A trainer of two FSDP2 ranks (float32 masters, a Qwen2 model of about 0.5 B parameters) pushes its
weights in bfloat16 to two replicas. First, the replicas are plain processes that copy every byte
into their own memory, like an engine that uses the tensors as they arrive. These pushes are
compared with memcpy: a plain replica copies between two buffers, in turns with the pushes. Then,
the replicas are two real vLLM engines. Their own work (fusing layers, packing them for the CPU) is
measured separately.

    python benchmarks/weight_sync.py [--pushes 5] [--bucket-mb N] [--layers 24] [--no-vllm]

benchmarks/gpu/pushes.py does the same on one GPU, through CUDA IPC.

Phases, in seconds; they overlap:

* gather: a rank waits for other ranks to make whole tensors; not needed when parts are sent.
* pack: conversion from float32 to bfloat16, into the bucket.
* receive: the slowest replica waits for bytes and copies them.
* load: the slowest replica writes them into its own memory layout.

GB/s is the number of bytes that reach the replicas (twice the size of the model), divided by the
time from the agreement to the "done" of the last replica; for vLLM, without the load of the slowest
replica. cpu_s is the CPU time of all ranks and plain replicas, which depends little on other load
of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from roll.weight_sync.channel import TransportKind

GB = 1e9
TIMEOUT_S = 900.0
COPY_BYTES = 256 << 20
COPIES = 4
REPLICAS = 2
HEADER = (
    f"{'':28} {'GB/s':>6} {'/copy':>6} {'total_s':>7} {'gather':>7} {'pack':>7} "
    f"{'receive':>8} {'load':>7} {'cpu_s':>7} {'extra MiB':>9}"
)
Task = dict[str, Any]
COPY: Task = {"memcpy": True}


def make_model(path: Path, layers: int, vocabulary: int) -> None:
    """Write a model with random weights. Its sizes, apart from the given ones, are those of
    Qwen2.5-0.5B."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True, dtype="bfloat16", bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(path)
    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(path)
    print(f"model: {model.num_parameters() / 1e6:.0f} M parameters")


class Cost:
    """Meter for a block in this process: its CPU time in seconds, and the peak of resident memory
    above the level at its start, in bytes, as the kernel counts it."""

    def __enter__(self) -> Cost:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._kib("VmRSS")
        self._cpu_begun = time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.cpu_s = time.process_time() - self._cpu_begun
        self.extra_bytes = (self._kib("VmHWM") - self._before) * 1024

    @staticmethod
    def _kib(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def trainer(
    pipe: Connection, rank: int, world: int, port: int, path: Path, platform: str = "cpu"
) -> None:
    import torch

    from roll.config.sections.model import ModelConfig
    from roll.config.sections.optimizers.kinds import AdamWConfig
    from roll.config.sections.roles import Role
    from roll.config.sections.strategy import Fsdp2Config
    from roll.core.types import WorkerSpec
    from roll.strategy.backend_setup import ModelSetup
    from roll.strategy.fsdp2.train import Fsdp2Strategy
    from roll.strategy.training.heads import PolicyHead
    from roll.weight_sync.manifest import Manifest
    from roll.weight_sync.transfer import send

    torch.set_num_threads(1)
    spec = WorkerSpec(
        Role.ACTOR_TRAIN, rank, world, (rank,), (rank,), 0, f"127.0.0.1:{port}", 0, platform
    )
    setup = ModelSetup(
        spec=spec,
        model=ModelConfig(path=str(path), dtype="bfloat16"),
        head=PolicyHead(1.0, 1024),
        max_tokens_per_microbatch=1024,
        optimizer=AdamWConfig(),
        total_steps=1,
    )
    strategy = Fsdp2Strategy(Fsdp2Config(), setup)

    def push(task: Task) -> dict[str, Any]:
        whole = strategy.weight_manifest()
        if task["gathered"]:  # all ranks make whole tensors, only rank 0 sends them
            manifest, parts = Manifest(whole.tensors), strategy.export_weights()
            if rank > 0:
                for _ in parts:
                    pass
                return {}
        else:
            manifest, parts = whole, strategy.export_parts()
        with Cost() as cost:
            report = send(task["channel"], parts, manifest, verify=task["verify"], sender=rank)
        return {
            "total_s": report.total_s, "gather_s": report.gather_s, "pack_s": report.pack_s,
            "bytes": report.num_bytes, "extra": cost.extra_bytes, "cpu_s": cost.cpu_s,
            "checksum": report.checksum,
        }  # fmt: skip

    serve(pipe, push)


def plain_replica(pipe: Connection, index: int, device: str = "cpu") -> None:
    """Run a plain replica: it receives all tensors into memory of the device that it allocated
    before, as an engine does for its model. It also measures memcpy on demand."""
    import torch

    from roll.weight_sync.transfer import receive

    torch.set_num_threads(1)
    own: dict[str, Any] = {}

    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)

    def memcpy_s() -> float:
        begun = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / COPIES

    def take(task: Task) -> dict[str, Any]:
        if task == COPY:
            with Cost() as cost:
                seconds = memcpy_s()
            return {"memcpy_s": seconds, "cpu_s": cost.cpu_s / COPIES}
        with (
            Cost() as cost,
            receive(task["channel"], index, check=lambda manifest: None) as incoming,
        ):
            for meta in incoming.manifest.tensors:
                if meta.name not in own:
                    own[meta.name] = torch.ones(meta.shape, dtype=meta.torch_dtype, device=device)
            for _ in incoming.tensors(into=lambda meta: own[meta.name]):
                pass
        return {
            "receive_s": incoming.receive_s, "load_s": incoming.load_s,
            "extra": cost.extra_bytes, "cpu_s": cost.cpu_s, "checksum": incoming.checksum,
        }  # fmt: skip

    serve(pipe, take)


def vllm_replica(pipe: Connection, index: int, path: Path, platform: str = "cpu") -> None:
    from roll.config.sections.engines import VllmConfig
    from roll.config.sections.model import ModelConfig
    from roll.config.sections.roles import Role
    from roll.core.types import WorkerSpec
    from roll.platform.machine import cores
    from roll.strategy.backend_setup import EngineSetup
    from roll.strategy.vllm.engine import VllmEngine

    mine = cores()[index % len(cores()) :][:1]
    spec = WorkerSpec(Role.ACTOR_INFER, index, 2, (index,), mine, 0, "127.0.0.1:1", 0, platform)
    model = ModelConfig(path=str(path), dtype="bfloat16")
    setup = EngineSetup(spec=spec, model=model, dtype="bfloat16", max_model_len=256)
    # On a GPU the trainer is beside it, and vLLM refuses to start if its share is not free.
    beside: dict[str, Any] = {"gpu_memory_utilization": 0.5, "kv_cache_gb": 1.0}
    config = VllmConfig(**({} if platform == "cpu" else beside))
    engine = VllmEngine(config, setup)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    version = 0

    def take(task: Task) -> dict[str, Any]:
        nonlocal version
        version += 1
        loading = engine.load_weights(
            task["channel"], version, receiver=index, verify=task["verify"]
        )
        report = loop.run_until_complete(loading)
        return {
            "receive_s": report.receive_s, "load_s": report.load_s, "checksum": report.checksum,
        }  # fmt: skip

    serve(pipe, take)
    loop.run_until_complete(engine.close())


def serve(pipe: Connection, work: Callable[[Task], dict[str, Any]]) -> None:
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        pipe.send(work(task))


@dataclass
class Team:
    """Group of processes, with a pipe to each."""

    pipes: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def start(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args))
        process.start()
        theirs.close()
        self.pipes.append(mine)
        self.processes.append(process)

    def ready(self) -> None:
        for pipe in self.pipes:
            answer(pipe)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(60)


def answer(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"a process gave no answer within {TIMEOUT_S:g} s")
    return pipe.recv()


def push_once(
    trainers: Team, replicas: Team, kind: TransportKind, folder: Path, bucket_bytes: int | None,
    *, gathered: bool = False, verify: bool = False,
) -> dict[str, Any]:  # fmt: skip
    from roll.weight_sync.transport_choice import new_channel

    channel = new_channel(
        kind, num_receivers=len(replicas.pipes), num_senders=1 if gathered else len(trainers.pipes),
        bucket_bytes=bucket_bytes, timeout_s=60, folder=folder,
    )  # fmt: skip
    task = {"channel": channel, "gathered": gathered, "verify": verify}
    pipes = [*trainers.pipes, *replicas.pipes]
    for pipe in pipes:
        pipe.send(task)
    sent = [answer(pipe) for pipe in trainers.pipes]
    got = [answer(pipe) for pipe in replicas.pipes]
    if verify:
        assert {each["checksum"] for each in got} == {sent[0]["checksum"]}
    sent = [each for each in sent if each]
    return {
        "total_s": sent[0]["total_s"],
        "bytes": sent[0]["bytes"],
        "gather_s": max(each["gather_s"] for each in sent),
        "pack_s": max(each["pack_s"] for each in sent),
        "receive_s": max(each["receive_s"] for each in got),
        "load_s": max(each["load_s"] for each in got),
        "extra": max(each.get("extra", 0) for each in [*sent, *got]),
        "cpu_s": sum(each.get("cpu_s", 0.0) for each in [*sent, *got]),
    }


def memcpy_once(replicas: Team) -> tuple[float, float]:
    """Let one replica copy alone; return its GB per second of wall-clock time, and per second of
    CPU time."""
    replicas.pipes[0].send(COPY)
    found = answer(replicas.pipes[0])
    return COPY_BYTES / found["memcpy_s"] / GB, COPY_BYTES / found["cpu_s"] / GB


def report(
    name: str,
    rows: list[dict[str, Any]],
    seconds: list[float],
    memcpy: float,
    replicas: int = REPLICAS,
) -> float:
    """Print one line of the table; return the bandwidth divided by that of memcpy.

    Args:
        rows: results of each push.
        seconds: time of each push that counts for the bandwidth.
        memcpy: bandwidth of memcpy in GB/s.
    """

    def middle(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    rate = replicas * rows[0]["bytes"] / statistics.median(seconds) / GB
    print(
        f"{name:28} {rate:6.2f} {rate / memcpy:6.2f} {middle('total_s'):7.3f} "
        f"{middle('gather_s'):7.3f} {middle('pack_s'):7.3f} {middle('receive_s'):8.3f} "
        f"{middle('load_s'):7.3f} {middle('cpu_s'):7.3f} "
        f"{max(row['extra'] for row in rows) / 2**20:9.0f}"
    )
    return rate / memcpy


CASES: dict[str, dict[str, Any]] = {
    "shared memory": {"kind": "shared_memory"},
    "shared memory, gathered": {"kind": "shared_memory", "gathered": True},
    "broadcast (gloo)": {"kind": "broadcast"},
    "files": {"kind": "files"},
}


def measure_plain(trainers: Team, folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Print the table of the plain replicas.

    Returns:
        The bandwidth of shared memory divided by that of memcpy, and that of memcpy in GB/s.
    """
    replicas = Team()
    for index in range(REPLICAS):
        replicas.start(plain_replica, index)
    replicas.ready()
    bucket = args.bucket_mb and args.bucket_mb << 20
    # The first push of each case also allocates the replicas' memory, and is checked by checksum.
    for case in CASES.values():
        warm = push_once(
            trainers, replicas, folder=folder, bucket_bytes=bucket, verify=True, **case
        )
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    copies = []
    for _ in range(args.pushes):
        for name, case in CASES.items():
            copies.append(memcpy_once(replicas))
            rows[name].append(
                push_once(trainers, replicas, folder=folder, bucket_bytes=bucket, **case)
            )
    replicas.close()
    memcpy, per_cpu_s = (statistics.median(column) for column in zip(*copies, strict=True))
    print(
        f"{warm['bytes'] / GB:.2f} GB to two replicas; memcpy by one process: {memcpy:.2f} GB/s, "
        f"{per_cpu_s:.2f} GB per CPU second"
    )
    print("every transport: checksum of all tensors equal at both ends")
    ratios = [
        report(name, rows[name], [row["total_s"] for row in rows[name]], memcpy) for name in CASES
    ]
    return ratios[0], memcpy


def measure_vllm(
    trainers: Team, path: Path, folder: Path, args: argparse.Namespace, memcpy: float
) -> float:
    engines = Team()
    for index in range(REPLICAS):
        engines.start(vllm_replica, index, path)
    engines.ready()
    bucket = args.bucket_mb and args.bucket_mb << 20
    push_once(trainers, engines, "shared_memory", folder, bucket, verify=True)
    rows = [
        push_once(trainers, engines, "shared_memory", folder, bucket) for _ in range(args.pushes)
    ]
    engines.close()
    seconds = [row["total_s"] - row["load_s"] for row in rows]
    return report("vLLM, shared memory", rows, seconds, memcpy)


def main() -> None:
    from roll.platform.machine import free_port

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pushes", type=int, default=5, help="of each transport")
    parser.add_argument("--bucket-mb", type=int, help="by default as in a run")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--no-vllm", action="store_true", help="plain replicas only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path, folder = Path(temporary) / "model", Path(temporary) / "transfer"
        folder.mkdir()
        make_model(path, args.layers, args.vocabulary)
        trainers = Team()
        port = free_port()
        for rank in range(2):
            trainers.start(trainer, rank, 2, port, path)
        trainers.ready()
        print(HEADER)
        ratio, memcpy = measure_plain(trainers, folder, args)
        if not args.no_vllm:
            measure_vllm(trainers, path, folder, args, memcpy)
        trainers.close()
    sys.exit(0 if ratio >= 0.5 else 1)


if __name__ == "__main__":
    main()
