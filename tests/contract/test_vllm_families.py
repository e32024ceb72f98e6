"""Families that vLLM serves without a GPU: its log-probs are transformers', also after a push."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.commands.preloads import ENGINES_APART, SHARED
from roll.distributed.processes.child_forks import FORKS_CHILDREN
from roll.distributed.processes.fork_server import ForkServer
from tests.contract import served_job
from tests.contract.served_job import Served

ROOT = Path(__file__).parents[2]
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_EXPERTS = {"moe_intermediate_size": 48}  # vLLM pads it
_DELTA_NET = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral3": {},
    "qwen2_tied": {},
    "phi3": {},
    "glm4": {},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3": {},
    "gemma4": {"global_head_dim": 64},
    "granite": {},
    "olmo2": {},
    "smollm3": {},
    "seed_oss": {},
    "mixtral": {},
    "olmoe": {},
    "granitemoe": {},
    "qwen2_moe": _EXPERTS,
    "glm4_moe": _EXPERTS,
    "gpt_oss": {"rope_parameters": _YARN, "intermediate_size": 64, "swiglu_limit": 7.0},
}
"""Settings with which vLLM computes tiny models of `tests/families.py` without a GPU."""
IN_BFLOAT16: dict[str, dict[str, Any]] = {
    "qwen3_next": _EXPERTS | _DELTA_NET,
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": _EXPERTS | _DELTA_NET,
}
"""The same of models with delta nets, which vLLM computes in bfloat16 only."""
_LINEAR = {"dtype": "bfloat16", "prefix_caching": False}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Its forks, and the forks of these, have imported vLLM: most of what a start costs."""
    with ForkServer(SHARED, [ENGINES_APART["vllm"], "tests.contract.engine_rig"]) as server:
        yield server


def served(
    server: ForkServer, folder: Path, name: str, sizes: dict[str, Any], **options: Any
) -> Served:
    """What `served_job` finds, in a fork of the server."""
    arguments = {"name": name, "sizes": sizes, "options": options}
    (folder / "arguments.json").write_text(json.dumps(arguments))
    ended = subprocess.run(
        f"exec {server.engine_python} {served_job.__file__} {folder}",
        shell=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), FORKS_CHILDREN: "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    return Served(**json.loads((folder / "served.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_transformers_before_and_after_a_push(
    server: ForkServer, tmp_path: Path, name: str
) -> None:
    found = served(server, tmp_path, name, FAMILIES[name])
    assert max(found.before, found.after) < 2e-5
    assert found.least > 1e-4, f"a push without {found.least_name} would go unnoticed"


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_log_probs_in_bfloat16_are_those_of_the_weights_that_were_pushed(
    server: ForkServer, tmp_path: Path, name: str
) -> None:
    found = served(server, tmp_path, name, IN_BFLOAT16[name], **_LINEAR)
    assert found.mean < 0.1
    assert found.stale > 1
