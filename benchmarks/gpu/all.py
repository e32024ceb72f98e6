"""All measurements of one GPU, one after the other, each with a time limit.

    python benchmarks/gpu/all.py [--only NAME,...] [--out outputs/gpu]

On a machine with a GPU (40 GB or more, no network) it takes at most 40 minutes. The output of each
part goes to the screen and to a file in `--out`, `machine.txt` names the GPU and the versions, and
`parts.json` how each part ended. The exit code is 0 if all of them did their work.

On a machine without a GPU it prints what it would measure, and with which command, and exits
with 0. docs/gpu.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the script also runs by its path

from roll.platform.machine import count_gpus

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Part:
    """One measurement."""

    measures: str
    command: str
    """Arguments of Python."""
    minutes: float
    """Time limit."""


PARTS = {
    "step": Part(
        "time of a step and tokens per second, beside a bare vLLM and a bare PyTorch step on the "
        "same GPU",
        "benchmarks/overhead.py --device cuda --case 0.6B --steps 6 --rounds 1",
        10,
    ),
    "small_step": Part(
        "the same for the quickstart, where a step is mostly fixed costs",
        "benchmarks/overhead.py --device cuda --case quickstart --steps 8 --rounds 1",
        7,
    ),
    "pushes": Part(
        "time of a push of weights to another process, by transport and size of the model",
        "benchmarks/gpu/pushes.py --sizes 0.6B,1.7B --pushes 5",
        8,
    ),
    "kernels": Part(
        "time and peak of memory: log-probs whole and in chunks, kernels of attention, padded and "
        "packed rows, layers compiled and as they are",
        "benchmarks/gpu/kernel_times.py --size 0.6B --tokens 8192",
        8,
    ),
    "loading": Part(
        "peak of device memory while a rank loads a model, beside the bound of docs/memory.md",
        "benchmarks/loading.py --device cuda --ranks 1 --cases fsdp2,zero3,megatron",
        4,
    ),
    "estimate": Part(
        "peak of device memory in training, beside the estimate of `roll check`",
        "benchmarks/memory_estimate.py --device cuda --ranks 1",
        3,
    ),
}
"""Their limits together are the 40 minutes."""


def plan() -> str:
    """Return what would be measured on a GPU, for a machine without one."""
    lines = ["there is no GPU here; on a machine with one this command measures:"]
    for name, part in PARTS.items():
        lines.append(f"\n{name}: {part.measures} (at most {part.minutes:g} minutes)")
        lines.append(f"    python {part.command}")
    return "\n".join(lines)


def measure(part: Part, output: Path) -> dict[str, float | int | str]:
    """Run a part; return how it ended.

    Args:
        output: file that its output is written to.
    """
    begun, late = time.monotonic(), threading.Event()
    process = subprocess.Popen(
        [sys.executable, *part.command.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )

    def give_up() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(60 * part.minutes, give_up)
    timer.start()
    assert process.stdout is not None
    with output.open("w") as file:
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
    code = process.wait()
    timer.cancel()
    seconds = round(time.monotonic() - begun, 1)
    ended = f"no end after {part.minutes:g} minutes" if late.is_set() else f"exit code {code}"
    return asdict(part) | {"seconds": seconds, "ended": ended}


def machine() -> str:
    """Return the GPU and the versions that figures depend on."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv"]
    told = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    packages = ("torch", "vllm", "transformers", "deepspeed", "megatron-core", "flash-attn")
    return told.stdout + "\n".join(f"{name} {_version(name)}" for name in packages) + "\n"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help="names of parts")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu")
    args = parser.parse_args()
    names = args.only.split(",")
    if strange := [name for name in names if name not in PARTS]:
        parser.error(f"no part {strange[0]!r}; there are {', '.join(PARTS)}")
    if not count_gpus():
        print(plan())
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "machine.txt").write_text(machine())
    ends = {}
    for name in names:
        print(f"\n== {name}: {PARTS[name].measures}", flush=True)
        ends[name] = measure(PARTS[name], args.out / f"{name}.txt")
        (args.out / "parts.json").write_text(json.dumps(ends, indent=2))
    print(f"\n{args.out}: " + ", ".join(f"{name} {end['ended']}" for name, end in ends.items()))
    return 0 if all(end["ended"] == "exit code 0" for end in ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
