"""Benchmark of `roll check --fast`, which reads a run file and tries nothing out.

The script checks every example, and the quickstart with a wrong key, several times each in turn,
and prints the medians of the seconds and of the CPU time. Python has compiled the files before, as
it has for a user from the second command on. The exit code is 0 if no median of the CPU time is
above `LIMIT_S`.

    python benchmarks/check_time.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
CODE = "import sys; from roll.cli import app; app(['check', '--fast', *sys.argv[1:]])"
TYPO = ["examples/rlvr_quickstart/run.yaml", "max_stepz=1"]
LIMIT_S = 2.0
"""Goal: largest CPU time of a check, in seconds."""


def taken_s(arguments: list[str], exit_code: int) -> tuple[float, float]:
    """Run a check and return its time and its CPU time, in seconds.

    Args:
        arguments: run file and overrides.
        exit_code: the one that is expected.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begun, before = time.monotonic(), os.times()
    command = [sys.executable, "-c", CODE, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    took_s, after = time.monotonic() - begun, os.times()
    if done.returncode != exit_code:
        raise SystemExit(done.stdout + done.stderr)
    spent_user = after.children_user - before.children_user
    return took_s, spent_user + after.children_system - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("examples/*/*.yaml"))]
    checks = {file: ([file], 0) for file in files} | {"a wrong key": (TYPO, 2)}
    for arguments, exit_code in checks.values():
        taken_s(arguments, exit_code)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in checks}
    for _ in range(args.rounds):
        for name, check in checks.items():
            found[name].append(taken_s(*check))
    print("| check | time | CPU |\n|---|---:|---:|")
    worst_s = 0.0
    for name, pairs in found.items():
        took_s, cpu_s = (median(column) for column in zip(*pairs, strict=True))
        worst_s = max(worst_s, cpu_s)
        print(f"| {name} | {took_s:.2f} s | {cpu_s:.2f} s |")
    print(
        f"at most {worst_s:.2f} s of CPU, goal {LIMIT_S} s: {'FAIL' if worst_s > LIMIT_S else 'ok'}"
    )
    sys.exit(worst_s > LIMIT_S)


if __name__ == "__main__":
    main()
