"""How long idle threads of OpenMP spin, and what that costs the steps of a run.

For each number of rounds (`GOMP_SPINCOUNT`) the script prints the CPU time that the idle threads of
a process take behind one parallel region, and the median time of a step in the two cases of
overhead.py. 300,000 is the library's own default; `passive` lets threads sleep at once.

    python benchmarks/spinning.py [--counts passive,10000,20000,50000,300000] [--steps 25]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that the script also runs by its path

from benchmarks.overhead import SKIP, framework_steps, make_cases, median  # noqa: E402
from roll.distributed.on_ray.environment import WAITING, environment  # noqa: E402

REGIONS = """
import resource, time, torch
torch.set_num_threads(2)
numbers = torch.ones(200_000)
def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
def one(pause_s):
    numbers.add_(1)
    time.sleep(pause_s)
one(0.1)
begun = cpu_s()
for _ in range(100):
    one(0.03)
print(10 * (cpu_s() - begun))
"""
"""Program that prints the CPU time of a region and a pause, in ms."""


def variables(count: str) -> dict[str, str | None]:
    """Return the variables for a number of rounds, or for `passive`."""
    found: dict[str, str | None] = dict.fromkeys(WAITING)
    chosen = {"OMP_WAIT_POLICY": count} if count == "passive" else {"GOMP_SPINCOUNT": count}
    return found | chosen


def region_ms() -> float:
    """Return the CPU time of one parallel region and the spinning behind it, in ms."""
    command = [sys.executable, "-c", REGIONS]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", default="passive,10000,20000,50000,300000")
    parser.add_argument("--steps", type=int, default=25, help="of each run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        cases = make_cases(Path(name)) if args.steps else []
        for count in args.counts.split(","):
            with environment(variables(count)):
                told = f"{count:>8}: {region_ms():6.2f} ms of CPU behind a region"
                for case in cases:
                    folder = Path(name) / f"{case.name}-{count}"
                    records = framework_steps(case, folder, args.steps + SKIP)
                    told += f"; {case.name} {median(records, 'time/step_s'):.3f} s a step"
            print(told, flush=True)


if __name__ == "__main__":
    main()
