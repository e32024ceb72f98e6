"""Families that vLLM serves without a GPU: its log-probs are transformers', also after a push."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contract.served import serve

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
_LINEAR: dict[str, Any] = {"dtype": "bfloat16", "prefix_caching": False}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_transformers_before_and_after_a_push(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, name: str
) -> None:
    found = serve(tmp_path, name, FAMILIES[name], loop)
    assert max(found.before, found.after) < 2e-5
    assert found.least > 1e-4, f"a push without {found.least_name} would go unnoticed"


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_log_probs_in_bfloat16_are_those_of_the_weights_that_were_pushed(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, name: str
) -> None:
    found = serve(tmp_path, name, IN_BFLOAT16[name], loop, **_LINEAR)
    assert found.mean < 0.1
    assert found.stale > 1
