"""The way of long samples and large pictures over a real Ray, with scripted models."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.small_workers import ROOT


def _measured(samples: int, **settings: int) -> dict[str, float]:
    """The row of totals of one run of the benchmark, by column."""
    command = [sys.executable, "benchmarks/data_path.py", "--samples", str(samples)]
    command += [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert told.returncode == 0, told.stderr
    heads, values = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in told.stdout.splitlines()
        if line.startswith("| ")
        and ("driver CPU" in line or line.startswith(f"| {samples} |"))
        and line.count("|") > 10
    )
    return {name: float(value.replace(",", "")) for name, value in zip(heads, values, strict=True)}


@pytest.mark.slow
def test_the_tokens_of_a_step_pass_the_driver_by_and_are_gone_when_it_ends() -> None:
    """Two ranks share each row; 64 samples have about 100,000 tokens."""
    row = _measured(64, siblings=16, median=1500, longest=4000, steps=2, ranks=1, tp=2)
    assert row["tokens"] > 50_000
    assert row["store, MB"] >= 1
    assert row["left, MB"] == 0
    # Of 1,500 tokens and their text, which are about 18,000 bytes.
    assert row["out, B/sample"] + row["in, B/sample"] < 3_000


@pytest.mark.slow
def test_the_pictures_of_a_step_pass_the_driver_by_and_are_gone_when_it_ends() -> None:
    """A picture of 1024 x 1024 pixels has 6 MB of patches and 1,369 tokens."""
    lengths = {"siblings": 8, "prompt": 16, "median": 50, "longest": 100, "steps": 2}
    row = _measured(128, picture=1024, **lengths)
    assert row["store, MB"] >= 16 * 5
    assert row["left, MB"] == 0
    # The groups end one after another, as their pictures become ready; each answer is short. On a
    # busy machine more of them are alone in a message.
    assert row["out, B/sample"] + row["in, B/sample"] < 1_200
