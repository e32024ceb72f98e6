"""What the way of a step's rows costs the driver: this project's way, and those of peers, with the
same rows.

Four producers have made scripted completions, with the lengths of `data_path.py`: tokens int32,
log-probs float32. Each step brings them to two consumers on one Ray, by the ways of
`peer_paths.py`. The consumers read every row once; their sums must be those of the producers. No
way does more, so the numbers of this project are smaller than those of `data_path.py`, whose step
is that of a run, and those of a peer are smaller than those of its trainer.

* `tokens`: tokens of a step. `s`: seconds of the step.
* `driver CPU`: CPU time of the driver's process in the step, all threads, with Ray's; in
  nanoseconds per token.
* `out`, `in`: bytes that the driver serializes for other processes and reads from them, per sample,
  counted in Ray's serialization (`driver_meter.Border`) and in the sockets of ZeroMQ.
* `anonymous`, `resident`: growth of the driver's memory in the step up to its peak, without and
  with the pages that it shares with the store.

Medians of `--steps` steps, after one that is not counted; each way on a Ray of its own.

A peer whose packages are missing is left out, and so is a size for which the machine has too
little memory; the reason is printed. `DataProto` with 4,096 samples needs more than 10 GB. An
environment with all packages, beside the project's own, where `python` is the project's:

    python -m venv --system-site-packages peers
    SITE='import sysconfig; print(sysconfig.get_path("purelib"))'
    python -c "$SITE" > "$(peers/bin/python -c "$SITE")/project.pth"
    PEERS="transferqueue==0.1.11 verl==0.9.1 tensordict==0.15.3 pyvers"
    peers/bin/python -m pip install --no-deps $PEERS
    peers/bin/python benchmarks/data_path_peers.py [--samples 256,1024,4096] [--paths own,verl]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # as `roll run` leaves it out

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

import ray

from benchmarks import peer_paths
from benchmarks.driver_meter import Border, Observer
from benchmarks.peer_paths import CALL_TIMEOUT_S, PATHS, Proof, wires_watched
from benchmarks.scripted_run import Script
from benchmarks.simulation.lengths import LogNormal
from roll.config.sections.roles import Role
from roll.core.types import WorkerSpec

RAY_CPUS = 16
"""Number of CPUs that Ray believes in: TransferQueue asks for one for each of its actors."""
SETTLE_S = 0.5
"""Pause before each step, in which what the step before has left to do ends."""
PACKAGES = {"transfer_queue": ("TransferQueue", "tensordict"), "verl": ("verl", "tensordict")}
"""Way -> packages whose versions are printed."""


@dataclass(frozen=True)
class Step:
    """Measurements of one step, or medians of several."""

    samples: float
    tokens: float
    seconds: float
    cpu_s: float
    sent: float
    """Bytes out of the driver."""
    received: float
    anonymous: float
    """Growth of the driver's own memory up to its peak, in bytes."""
    resident: float


def middle(steps: Sequence[Step]) -> Step:
    """Return the median of each measurement."""
    names = Step.__dataclass_fields__
    return Step(**{name: median(getattr(step, name) for step in steps) for name in names})


def cells(name: str, step: Step) -> list[str]:
    """Return the row of the table."""
    return [
        name,
        f"{step.samples:,.0f}",
        f"{step.tokens:,.0f}",
        f"{step.seconds:.2f}",
        f"{step.cpu_s * 1e9 / step.tokens:.1f}",
        f"{step.sent / step.samples:,.0f}",
        f"{step.received / step.samples:,.0f}",
        f"{step.anonymous / 1e6:,.0f}",
        f"{step.resident / 1e6:,.0f}",
    ]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return the table of rows of cells."""
    heads = ["", "samples", "tokens", "s", "driver CPU, ns/token", "out, B/sample"]
    heads += ["in, B/sample", "anonymous, MB", "resident, MB"]
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    lines.insert(1, "|---|" + "---:|" * (len(heads) - 1))
    return "\n".join(lines)


def check(found: Proof, made: Proof, name: str) -> None:
    """Compare what consumers have read with what producers have made.

    Raises:
        ValueError: they differ.
    """
    if found != made:
        raise ValueError(f"{name}: the consumers read {found}, but the producers made {made}")


def own_memory() -> tuple[int, int]:
    """Return the anonymous and the resident memory of this process, in bytes."""
    lines = dict(
        line.split(":")
        for line in Path("/proc/self/status").read_text().splitlines()
        if "kB" in line
    )
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))  # type: ignore[return-value]


def lacks_memory(path: peer_paths.Path, samples: int) -> bool:
    """Return whether a step needs more memory than this machine has left, and say so."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    needed = path.memory(samples)
    if needed > left:
        print(
            f"{path.name} with {samples:,} samples is left out: it needs about "
            f"{needed / 1e9:.0f} GB of memory, and {left / 1e9:.0f} GB are available",
            file=sys.stderr,
        )
    return needed > left


def one_step(path: peer_paths.Path, observer: Any, made: Proof) -> Step:
    """Do one step and measure it."""
    time.sleep(SETTLE_S)
    border = Border(lambda: path.name)
    anonymous, resident = own_memory()
    ray.get(observer.begin.remote(os.getpid()), timeout=CALL_TIMEOUT_S)
    with border.watched(), wires_watched(border.sent, border.received):
        border.begin()
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        found = path.bring()
        cpu_s, took_s = time.process_time() - cpu_s, time.perf_counter() - begun_s
    peaks = ray.get(observer.end.remote(), timeout=CALL_TIMEOUT_S)
    check(found, made, path.name)
    return Step(
        made.rows,
        made.tokens,
        took_s,
        cpu_s,
        sum(border.sent.values()),
        sum(border.received.values()),
        peaks.anonymous - anonymous,
        peaks.resident - resident,
    )


def measure(kind: str, args: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table of one way, measured on a Ray of its own."""
    script = Script(LogNormal(args.median, args.sigma), args.longest)
    with ExitStack() as stack:
        ray.init(num_cpus=RAY_CPUS, include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        spec = WorkerSpec(Role.REWARD, 0, 1, (), (), 0, "", 0, "cpu", label="observer")
        observer = ray.remote(num_cpus=0)(Observer).remote(spec)
        path = PATHS[kind](script)
        stack.callback(path.close)
        rows = []
        for samples in map(int, args.samples.split(",")):
            if lacks_memory(path, samples):
                continue
            made = path.make(samples)
            steps = [one_step(path, observer, made) for _ in range(args.steps + 1)]
            rows.append(cells(path.name, middle(steps[1:])))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--paths", default=",".join(PATHS), help="ways to measure")
    add("--samples", default="256,1024,4096", help="of a step; one row for each number")
    add("--median", type=float, default=1024, help="tokens of a response")
    add("--sigma", type=float, default=1.0, help="of the log-normal lengths")
    add("--longest", type=int, default=32768, help="tokens; longer responses are cut off")
    add("--steps", type=int, default=3, help="that are counted")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    rows = []
    for kind in args.paths.split(","):
        try:
            versions = [f"{name} {version(name)}" for name in PACKAGES.get(kind, ())]
            rows += measure(kind, args)
        except (ImportError, PackageNotFoundError) as error:
            print(f"{kind} is left out: {error}", file=sys.stderr)
            continue
        if versions:
            print(", ".join(versions))
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
