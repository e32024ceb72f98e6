"""Joining a Ray cluster of several nodes; the nodes and their GPUs are pretended, Ray is real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from roll.distributed.on_ray.bundle_host import INLINE_BYTES
from tests.distributed.small_workers import ROOT


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
