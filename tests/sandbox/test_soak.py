"""Many programs of all kinds at once: none changes the verdict of another, nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest

from roll.sandbox import Job, Limits, Outcome, Sandbox
from roll.sandbox.worker.usage import descendants
from tests.sandbox.hostile_attacks import PROGRAMS

pytestmark = pytest.mark.slow
SHORT = Limits(cpu_s=0.1, wall_s=0.2, memory_mb=128, processes=8, output_bytes=2**16, disk_mb=4)
PATIENT = Limits(cpu_s=20, wall_s=120)
JOBS, HOSTILE = 1000, 0.3
# These look for processes to kill by their ids, which are not filled in here.
NAMES = [name for name, text in PROGRAMS.items() if "@" not in text]


def memory_mb() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def test_a_thousand_jobs() -> None:
    draw = random.Random(7)
    jobs: list[Job] = []
    expected: list[str | None] = []
    for n in range(JOBS):
        if draw.random() < HOSTILE:
            jobs.append(Job(PROGRAMS[draw.choice(NAMES)], "1 2\n", limits=SHORT))
            expected.append(None)
        else:
            wrong = draw.random() < 0.3
            program = f"a, b = map(int, input().split())\nprint(a * b + {int(wrong)})"
            jobs.append(Job(program, f"{n} {n + 1}", limits=PATIENT))
            expected.append(f"{n * (n + 1) + int(wrong)}\n")
    with Sandbox(workers=4) as sandbox:
        asyncio.run(sandbox.run_batch(jobs[:50]))  # warm
        before = memory_mb()
        outcomes = asyncio.run(sandbox.run_batch(jobs))
        grown = memory_mb() - before
        kept = sum(len(outcome.stdout) + len(outcome.stderr) for outcome in outcomes) / 2**20
        workers = [worker.pid for worker in sandbox._pool.workers]
    honest: list[tuple[Outcome, str]] = [
        (outcome, answer)
        for outcome, answer in zip(outcomes, expected, strict=True)
        if answer is not None
    ]
    assert [outcome for outcome, answer in honest if outcome.stdout != answer] == []
    assert all(outcome.ok for outcome, _ in honest)
    assert grown - kept < 10
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted(descendants(workers)) == sorted(workers)
