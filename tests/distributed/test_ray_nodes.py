"""Joining a Ray cluster of several nodes; the nodes and their GPUs are pretended, Ray is real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.distributed.on_ray.bundle_host import INLINE_BYTES
from tests.distributed.small_workers import ROOT


def assert_a_worker_lay_on_both(lines: list[dict[str, Any]]) -> None:
    """Its parts knew each other, ended together, and met at a new port each time."""
    parts = [line for line in lines if "part" in line]
    for first, second in zip(parts[::2], parts[1::2], strict=True):
        both = {"visible": "0,1", "parts": [[0, [0, 1]], [1, [0, 1]]], "alive": True}
        assert first.items() >= {**both, "part": 0, "node": 0, "devices": [0, 1]}.items()
        assert second.items() >= {**both, "part": 1, "node": 1, "devices": [0, 1]}.items()
        assert first["meet"] == second["meet"]
    assert len({line["meet"] for line in parts}) == len(parts) // 2 == 2
    assert [line["gone"] for line in lines if "gone" in line] == [[True, True]] * 2
    assert {"uses": 2} in lines
    (told,) = (line for line in lines if "told" in line)
    assert told["ranks"] == [0]
    assert told["told"].startswith("actor_infer[0].1 died (pid ")
    assert "the part on the second node has lost process 7" in told["told"]
    (alone,) = (line["alone"] for line in lines if "alone" in line)
    assert alone.startswith("pools.all: devices 0, 1, 2, 3 make one engine but lie on several")


@pytest.mark.slow
def test_two_joined_nodes_give_their_gpus_in_order_and_say_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.distributed.two_nodes", str(tmp_path)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert told.returncode == 0, told.stderr
    lines = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    assert [line for line in lines if "rank" in line] == [
        {"rank": 0, "node": 0, "devices": [0], "visible": "0"},
        {"rank": 1, "node": 0, "devices": [1], "visible": "1"},
        {"rank": 2, "node": 1, "devices": [0], "visible": "0"},
        {"rank": 3, "node": 1, "devices": [1], "visible": "1"},
        {"rank": 0, "node": 1, "devices": [0, 1], "visible": "0,1"},
    ]
    assert [line for line in lines if "hca" in line] == [{"hca": "mlx5", "token": "t"}] * 5
    (scored,) = (line for line in lines if "scored_on" in line)
    assert scored == {"scored_on": [0, 0, 1, 1] * 2, "failed": 0}  # in turn
    assert_a_worker_lay_on_both(lines)
    before, after = (line for line in lines if "lives" in line)
    assert before == {"lives": True, "tokens": INLINE_BYTES // 8}
    assert not after["lives"]
    assert after["lost"].startswith("the tokens of completions cannot be had: ")
    errors = [line["error"] for line in lines if "error" in line]
    assert errors[0].startswith("WaitTimeoutError: waited 2 s for 3 Ray nodes")
    assert errors[1].startswith("ConfigError: pools.all names device 4, but there are 4 GPUs")
    for refused, why in zip(errors[2:], ("is not its own", "shows none"), strict=True):
        assert "lets nobody in without its token" in refused
        assert why in refused
        assert "ray get-auth-token --generate" in refused
