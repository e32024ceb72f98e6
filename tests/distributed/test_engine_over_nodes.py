"""One vLLM engine with two tensor parallel ranks over two nodes; both nodes are on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.small_workers import ROOT


@pytest.mark.slow
def test_an_engine_over_two_nodes_writes_what_hugging_face_does_and_ends_with_its_follower(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "tests.distributed.engine_over_nodes", str(tmp_path)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert told.returncode == 0, told.stderr
    started, sent, pushed, woken, lost, left = (
        json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")
    )
    assert started == {"same": True}
    assert sent == {"route": "broadcast", "nodes": [0, 1]}
    assert pushed == {"same": True, "changed": True}
    assert woken == {"same": True, "version": 1}
    assert lost["lost"].startswith("actor_infer[0].1 died (pid ")
    assert "(VLLM::Worker_TP1) is gone" in lost["lost"]
    assert left == {"count": 3, "left": []}  # the scheduler and two ranks
