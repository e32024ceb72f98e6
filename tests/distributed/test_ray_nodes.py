"""Joining a Ray cluster of several nodes; the nodes and their GPUs are pretended, Ray is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).parent / "two_nodes.py"


@pytest.mark.slow
def test_two_joined_nodes_give_their_gpus_in_order_and_say_what_is_missing() -> None:
    repository = str(DRIVER.parents[2])
    path = os.pathsep.join([repository, os.environ.get("PYTHONPATH", "")])
    environ = dict(os.environ, PYTHONPATH=path)
    told = subprocess.run(
        [sys.executable, str(DRIVER)], env=environ, capture_output=True, text=True, timeout=240
    )
    assert told.returncode == 0, told.stderr
    lines = [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]
    assert [line for line in lines if "rank" in line] == [
        {"rank": 0, "node": 0, "devices": [0], "visible": "0"},
        {"rank": 1, "node": 0, "devices": [1], "visible": "1"},
        {"rank": 2, "node": 1, "devices": [0], "visible": "0"},
        {"rank": 3, "node": 1, "devices": [1], "visible": "1"},
        {"rank": 0, "node": 1, "devices": [0, 1], "visible": "0,1"},
    ]
    errors = [line["error"] for line in lines if "error" in line]
    assert errors[0].startswith("WaitTimeoutError: waited 2 s for 3 Ray nodes")
    assert errors[1].startswith("ConfigError: pools.all names device 4, but there are 4 GPUs")
