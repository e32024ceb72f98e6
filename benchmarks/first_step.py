"""Benchmark of the time from a run's command to its first step, with and without a fork server.

The script runs the first step of `examples/rlvr_quickstart`, in turns with and without the fork
server, and prints medians. Make the model first: `python examples/sorting.py quickstart`.

    python benchmarks/first_step.py [--rounds 3] [key=value ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
RUN = "examples/rlvr_quickstart/run.yaml"
WITH = "from roll.cli import app; import sys; app(['run', *sys.argv[1:]])"
WITHOUT = (
    "import sys; from roll.config import load_config; from roll.commands.launch import launch; "
    "launch(load_config(sys.argv[1], sys.argv[2:]))"
)
LOOK_S = 0.05


def first_step_s(code: str, overrides: Sequence[str]) -> float:
    """Start a run, wait for its end, and return the seconds from its start to the record of its
    first step.

    Args:
        code: Python code of the run's command.
        overrides: settings of the run, `key=value`.
    """
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "run" / "metrics.jsonl"
        own = [f"output_dir={records.parent}", "max_steps=1", *overrides]
        with (Path(folder) / "log").open("w+") as log:
            begun = time.monotonic()
            run = subprocess.Popen(
                [sys.executable, "-c", code, RUN, *own], cwd=ROOT, stdout=log, stderr=log
            )
            while not (records.exists() and records.stat().st_size):
                if run.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"the run ended before its first step:\n{log.read()}")
                time.sleep(LOOK_S)
            took_s = time.monotonic() - begun
            if run.wait():
                raise SystemExit("the run failed after its first step")
        return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of the run, key=value")
    args = parser.parse_args()
    found: dict[str, list[float]] = {"forked workers": [], "workers started anew": []}
    for _ in range(args.rounds):
        for name, code in zip(found, (WITH, WITHOUT), strict=True):
            found[name].append(first_step_s(code, args.overrides))
            print(f"{name}: {found[name][-1]:.1f} s", flush=True)
    for name, seconds in found.items():
        print(f"{name}: median {median(seconds):.1f} s of {len(seconds)}")


if __name__ == "__main__":
    main()
