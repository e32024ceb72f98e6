"""Cost of `track.samples: all` in a real run: time of a step, and CPU time of the driver per step.

The quickstart's run (`--run`: another one) is started alternately with `track.samples: all` and
`none`, the order changing from round to round, so that a machine that becomes slower or faster
meets both alike. Validation and checkpoints are left out, as far as a run allows it. The first
steps of each run do not count. A round gives one quotient of the medians of both; their spread over
rounds says how far to trust the median of them.

`step` is `time/step_s` of metrics.jsonl. `driver` is the CPU time (user and system) of the driver's
process from one record to the next, read from /proc when the record has been written: Linux only.
The writer of samples works in a process of its own; `kept_samples.py` measures it.

    python benchmarks/samples_cost.py [--rounds 4] [--steps 60] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from roll.output_dir.trackers import read_records

ROOT = Path(__file__).parents[1]
QUICKSTART = "examples/rlvr_quickstart/run.yaml"
KINDS = ("none", "all")
LOOK_S = 0.005


@dataclass
class Steps:
    """Times of the steps of one run, in seconds; the first ones are left out."""

    step_s: list[float] = field(default_factory=list)
    driver_s: list[float] = field(default_factory=list)


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process up to now, in seconds."""
    told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


def lines_in(file: Path) -> int:
    """Return the number of whole lines of a file; 0 if there is none."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def measured(run: str, samples: str, steps: int, skip: int, overrides: Sequence[str]) -> Steps:
    """Do one run, and return what its steps took.

    Args:
        run: the run file.
        samples: value of `track.samples`.
        steps: number of steps.
        skip: number of first steps that do not count.
        overrides: settings of the run, `key=value`.
    """
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "run" / "metrics.jsonl"
        settings = [f"output_dir={records.parent}", f"max_steps={steps}", "checkpoint={}"]
        settings += ["validation={}", "track.rollouts_every=null", f"track.samples={samples}"]
        command = [sys.executable, "-m", "roll.cli", "run", run, *settings, *overrides]
        with (Path(folder) / "log").open("w+") as log:
            driver = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            readings: list[float] = []
            while driver.poll() is None:
                if len(readings) < steps and lines_in(records) > len(readings):
                    readings.append(cpu_s(driver.pid))
                time.sleep(LOOK_S)
            if driver.returncode:
                log.seek(0)
                raise SystemExit(f"the run failed:\n{log.read()[-3000:]}")
        told = [one["time/step_s"] for one in read_records(records) if "time/step_s" in one]
    if len(readings) != steps:
        raise SystemExit(f"saw {len(readings)} records of {steps}: the last came with the end")
    driver_s = [after - before for before, after in pairwise(readings)]
    return Steps(told[skip:], driver_s[max(skip - 1, 0) :])


def quotients(rounds: Sequence[dict[str, Steps]], of: str) -> list[float]:
    """Return the quotient `all` by `none` of the medians of each round."""
    return [
        median(getattr(each["all"], of)) / max(median(getattr(each["none"], of)), 1e-9)
        for each in rounds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default=QUICKSTART)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("overrides", nargs="*", help="of the run, key=value")
    args = parser.parse_args()
    if args.steps - args.skip < 2:
        parser.error("--steps must be at least 2 more than --skip")
    if args.run == QUICKSTART and not (ROOT / "outputs/quickstart/model").exists():
        subprocess.run([sys.executable, "examples/sorting.py", "quickstart"], cwd=ROOT, check=True)
    rounds: list[dict[str, Steps]] = []
    for number in range(args.rounds):
        order = KINDS if number % 2 == 0 else KINDS[::-1]
        done = {
            kind: measured(args.run, kind, args.steps, args.skip, args.overrides) for kind in order
        }
        rounds.append(done)
        told = ", ".join(f"{kind} {median(done[kind].step_s):.3f} s" for kind in KINDS)
        print(f"round {number + 1} of {args.rounds}: a step takes {told}", flush=True)
    print("\n| | none | all | all / none: median | smallest | largest |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, of in (("step, s", "step_s"), ("driver, CPU s", "driver_s")):
        each = [
            median([value for one in rounds for value in getattr(one[kind], of)]) for kind in KINDS
        ]
        spread = quotients(rounds, of)
        print(
            f"| {name} | {each[0]:.4f} | {each[1]:.4f} | {median(spread):.3f} "
            f"| {min(spread):.3f} | {max(spread):.3f} |"
        )


if __name__ == "__main__":
    main()
