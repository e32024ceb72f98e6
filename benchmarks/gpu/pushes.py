"""Benchmark of a weight push between two processes on one GPU, by transport and size of the model.

A trainer (one FSDP2 rank, float32 masters) pushes its weights in bfloat16 to a plain replica, which
copies them into memory of its own on the GPU, and to a vLLM engine. Columns and phases are those of
benchmarks/weight_sync.py, whose parts these are; memcpy is a copy within the GPU.

    python benchmarks/gpu/pushes.py [--sizes 0.6B,1.7B] [--pushes 5] [--bucket-mb N] [--no-vllm]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the script also runs by its path

from benchmarks.gpu.models import write_model
from benchmarks.weight_sync import (
    GB,
    HEADER,
    Team,
    memcpy_once,
    plain_replica,
    push_once,
    report,
    trainer,
    vllm_replica,
)
from roll.platform.machine import free_port
from roll.weight_sync.channel import TransportKind

KINDS: dict[str, TransportKind] = {"CUDA IPC": "cuda_ipc", "shared memory": "shared_memory"}
"""Transports that reach another process on the same GPU; NCCL takes no two ranks on one."""


def measure(size: str, folder: Path, args: argparse.Namespace) -> None:
    """Print the lines of one model."""
    path = write_model(folder / "model", size)
    bucket = args.bucket_mb and args.bucket_mb << 20
    trainers, plain = Team(), Team()
    trainers.start(trainer, 0, 1, free_port(), path, args.device)
    plain.start(plain_replica, 0, args.device)
    trainers.ready()
    plain.ready()
    memcpy = statistics.median(memcpy_once(plain)[0] for _ in range(3))
    print(f"\n{size}; memcpy {memcpy:.0f} GB/s\n{HEADER}", flush=True)
    kinds = KINDS if args.device == "cuda" else {"shared memory": KINDS["shared memory"]}
    for name, kind in kinds.items():
        # The first push also allocates the replica's memory, and is checked by checksum.
        warm = push_once(trainers, plain, kind, folder, bucket, verify=True)
        rows = [push_once(trainers, plain, kind, folder, bucket) for _ in range(args.pushes)]
        report(f"plain, {name}", rows, [row["total_s"] for row in rows], memcpy, replicas=1)
    print(f"{warm['bytes'] / GB:.2f} GB, checksums equal at both ends")
    plain.close()
    if not args.no_vllm:
        engines = Team()
        engines.start(vllm_replica, 0, path, args.device)
        engines.ready()
        for name, kind in kinds.items():
            push_once(trainers, engines, kind, folder, bucket, verify=True)
            rows = [push_once(trainers, engines, kind, folder, bucket) for _ in range(args.pushes)]
            report(f"vLLM, {name}", rows, [row["total_s"] for row in rows], memcpy, replicas=1)
        engines.close()
    trainers.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="0.6B,1.7B", help="of benchmarks/gpu/models.py")
    parser.add_argument("--pushes", type=int, default=5, help="of each transport")
    parser.add_argument("--bucket-mb", type=int, help="by default as in a run")
    parser.add_argument("--no-vllm", action="store_true", help="a plain replica only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args()
    for size in args.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            measure(size, Path(folder), args)


if __name__ == "__main__":
    main()
