"""Every hostile program is contained at every level, for root and for others, in containers too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.hostile_attacks import PROGRAMS
from tests.turns import in_groups

ROOT = Path(__file__).parents[2]
QUICK = ("namespaces", "landlock container")
OTHERS = (
    "namespaces ordinary",
    "landlock",
    "landlock ordinary",
    "strict",
    "strict ordinary",
    "strict ordinary container",
)
HELD = "word-of-the-parent-8861"
AT_ITS_LIMIT = {"cpu_time", "wall_time", "memory", "output", "processes"}


@pytest.fixture(scope="module", params=[*in_groups(QUICK), *in_groups(OTHERS, pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What became of each program in one place, by name."""
    place = request.param.split()
    if "ordinary" in place and os.geteuid() != 0:
        pytest.skip("this user is ordinary: the place without the word is the same")
    done = subprocess.run(
        [sys.executable, "-m", "tests.sandbox.run_hostile", *place],
        cwd=ROOT,
        env={**os.environ, "HELD_BY_THE_PARENT": HELD},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_it_is_contained_and_the_next_job_is_right(
    name: str, found: dict[str, dict[str, Any]]
) -> None:
    assert found[name]["leaks"] == [], found[name]
    if name.startswith("time-"):
        assert found[name]["status"] in AT_ITS_LIMIT


def test_there_are_enough_of_them() -> None:
    assert len(PROGRAMS) >= 90
    assert {name.partition("-")[0] for name in PROGRAMS} == {
        "time",
        "processes",
        "memory",
        "disk",
        "output",
        "reading",
        "attack",
        "network",
        "kernel",
        "between",
    }
