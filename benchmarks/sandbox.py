"""Measures how long a program takes in the sandbox, and how many run in a second.

`python benchmarks/sandbox.py [LEVEL ...]`, on a machine that does nothing else. Prints for each
level the median of one program after another, the programs per second on all workers, and the
CPU time of a program over all processes; and beside them a new interpreter for each program.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from roll.sandbox import LEVELS, Job, Limits, NoLevelError, Sandbox
from roll.sandbox.worker.usage import descendants, read_usage

ADD = "a, b = map(int, input().split())\nprint(a + b)"
WITH_NUMPY = "import numpy\n" + ADD
LIMITS = Limits(cpu_s=10, wall_s=60)


def median_ms(run: Callable[[], str], times: int) -> float:
    """Return the median time of `run`, which returns the sum of 19 and 23."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        assert run() == "42\n"
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def cold(program: str) -> str:
    """Run a program in an interpreter of its own, without isolation."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, input="19 23", capture_output=True, text=True).stdout


def cpu_s(sandbox: Sandbox) -> float:
    """Return the CPU time of this process and of all workers until now."""
    own = os.times()
    workers = [worker.pid for worker in sandbox._pool.workers]
    return own.user + own.system + read_usage(descendants(workers)).cpu_s


def measure(level: str, program: str, preload: tuple[str, ...], times: int) -> str:
    """Return the figures of a level as a row of a table."""
    job = Job(program, "19 23", limits=LIMITS)
    began = time.perf_counter()
    with Sandbox(level, workers=1, preload=preload) as sandbox:
        start = time.perf_counter() - began
        sandbox.run_now(job)
        median = median_ms(lambda: sandbox.run_now(job).stdout, times)
    with Sandbox(level, preload=preload) as sandbox:
        asyncio.run(sandbox.run_batch([job] * 20))
        before, began = cpu_s(sandbox), time.perf_counter()
        outcomes = asyncio.run(sandbox.run_batch([job] * times * 4))
        rate = len(outcomes) / (time.perf_counter() - began)
        cpu = (cpu_s(sandbox) - before) / len(outcomes) * 1e3
    assert all(outcome.stdout == "42\n" for outcome in outcomes)
    name = f"{level:12} {'numpy' if preload else '':6}"
    return f"{name} {median:8.2f} ms {rate:8.0f} /s {cpu:6.2f} ms CPU  start {start:.2f} s"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("levels", nargs="*", default=LEVELS)
    parser.add_argument("--times", type=int, default=300)
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores; p50, programs per second, CPU of a program")
    for program, preload in ((ADD, ()), (WITH_NUMPY, ("numpy",))):
        what = "numpy" if preload else ""
        run = median_ms(functools.partial(cold, program), options.times // 10)
        print(f"{'cold':12} {what:6} {run:8.2f} ms {1000 / run:8.0f} /s of one process at a time")
        for level in options.levels:
            try:
                print(measure(level, program, preload, options.times), flush=True)
            except NoLevelError as error:
                print(f"{level:12} {error}")


if __name__ == "__main__":
    main()
