"""How long a step takes beside other work on the machine, by the priority of Ray's workers.

The script runs the quickstart alone and beside one busy program per core, with the niceness that
Ray gives its workers by default, 15, and with that of everything else, 0. It prints the median time
of a step and the time of the whole run.

    python benchmarks/busy.py [--steps 10] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that the script also runs by its path

from benchmarks.overhead import SKIP, framework_steps, make_cases, median  # noqa: E402
from roll.distributed.on_ray.environment import environment  # noqa: E402
from roll.platform.machine import cores  # noqa: E402


@contextmanager
def busy_programs(number: int) -> Iterator[None]:
    """Let programs that do nothing but compute run during the block."""
    program = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(program) for _ in range(number)]
    try:
        yield
    finally:
        for each in programs:
            each.kill()
            each.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        case = next(each for each in make_cases(Path(name)) if each.name == "quickstart")
        for number in range(args.rounds):
            for busy in (0, len(cores())):
                for niceness in ("15", "0"):
                    folder = Path(name) / f"{number}-{busy}-{niceness}"
                    with busy_programs(busy), environment({"RAY_worker_niceness": niceness}):
                        begun = time.monotonic()
                        records = framework_steps(case, folder, args.steps + SKIP)
                        took = time.monotonic() - begun
                    step = median(records, "time/step_s")
                    found.setdefault((busy, niceness), []).append((step, took))
    for (busy, niceness), times in found.items():
        step, took = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{busy} busy programs, niceness {niceness:>2}: {step:.2f} s a step, {took:.0f} s")


if __name__ == "__main__":
    main()
