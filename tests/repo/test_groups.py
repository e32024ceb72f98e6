"""Tests that share a fixture run in one worker, which pytest-xdist ignores where it cannot."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def here() -> str:
    return "tests/repo/test_groups.py"


def test_a_worker_knows_the_group_of_a_test(request: pytest.FixtureRequest, here: str) -> None:
    if hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith(f"@{here}")


@pytest.mark.xdist_group("of its own")
def test_a_group_of_its_own_is_told_from_others(request: pytest.FixtureRequest, here: str) -> None:
    if hasattr(request.config, "workerinput"):
        group = request.node.nodeid.rpartition("@")[2]
        assert group == f"of its own_{here}"
