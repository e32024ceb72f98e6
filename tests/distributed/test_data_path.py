"""The way of long samples over a real Ray, with scripted models."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.small_workers import ROOT


@pytest.mark.slow
def test_the_tokens_of_a_step_pass_the_driver_by_and_are_gone_when_it_ends() -> None:
    """Two ranks share each row; 64 samples have about 100,000 tokens."""
    command = [sys.executable, "benchmarks/data_path.py", "--samples", "64", "--siblings", "16"]
    settings = [
        "--median",
        "1500",
        "--longest",
        "4000",
        "--steps",
        "2",
        "--ranks",
        "1",
        "--tp",
        "2",
    ]
    told = subprocess.run(
        [*command, *settings], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert told.returncode == 0, told.stderr
    heads, values = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in told.stdout.splitlines()
        if line.startswith("| ")
        and ("driver CPU" in line or line.startswith("| 64 |"))
        and line.count("|") > 10
    )
    row = {name: float(value.replace(",", "")) for name, value in zip(heads, values, strict=True)}
    assert row["tokens"] > 50_000
    assert row["store, MB"] >= 1
    assert row["left, MB"] == 0
    # Of 1,500 tokens and their text, which are about 18,000 bytes.
    assert row["out, B/sample"] + row["in, B/sample"] < 3_000
