"""Ranks that share rows or experts, and packed rows of Megatron, in run files: `roll check` refuses
models that forbid them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.commands.preflight import inspect
from roll.config import load_config
from tests.runs import write_task

NEXT: dict[str, object] = {"model_type": "qwen3_next"}
QWEN3 = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}


@pytest.mark.parametrize(
    ("cp", "tp", "packing", "model", "said"),
    [
        (2, 1, False, QWEN3, None),
        (4, 1, False, QWEN3, None),
        (4, 2, False, QWEN3, "strategy: cp = 4: each tensor parallel rank has 2 heads of queries"),
        (2, 1, False, NEXT, "strategy: cp = 2: a qwen3_next has gated delta nets"),
        (2, 1, False, {"model_type": "bert"}, "strategy: model_type 'bert' is not supported"),
        (1, 1, False, NEXT, None),
        (1, 2, True, QWEN3, None),
        (2, 1, True, QWEN3, None),
        (2, 1, True, NEXT, "strategy: cp = 2: a qwen3_next has gated delta nets"),
        (1, 1, True, NEXT, "packing: a qwen3_next has gated delta nets"),
        (1, 1, True, {"model_type": "bert"}, "strategy: model_type 'bert' is not supported"),
    ],
)
def test_models_whose_rows_cannot_be_shared_or_packed_are_refused_before_anything_starts(
    tmp_path: Path, cp: int, tp: int, packing: bool, model: dict[str, object], said: str | None
) -> None:
    file = write_task(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **model}))
    strategy = f"{{kind: megatron, cp: {cp}, tp: {tp}, sequence_parallel: null}}"
    overrides = [f"actor_train.strategy={strategy}", f"pools.all=0-{cp * tp - 1}"]
    overrides.append(f"actor_train.packing={str(packing).lower()}")
    loaded = load_config(file, ["cluster.platform=cpu", *overrides])
    told = [str(finding.error) for finding in inspect(loaded, {})]
    found = [error for error in told if error.startswith("actor_train.")]
    assert len(found) == (said is not None)
    key, _, text = (said or "").partition(": ")
    assert all(error.startswith(f"actor_train.{key}: ") and text in error for error in found)


@pytest.mark.parametrize(
    ("role", "ep", "model", "said"),
    [
        ("actor_train", 2, {"num_experts": 6}, None),
        ("actor_train", 4, {"num_experts": 6}, "6 experts of a layer of"),
        ("reference", 4, {"n_routed_experts": 6}, "do not divide over 4 ranks; set ep to a div"),
        ("actor_train", 2, {}, "(model type 'qwen3') has no experts; leave out ep"),
        ("actor_train", 1, {}, None),
        ("actor_train", 4, {"moe_experts": 6}, None),  # a family with a key of its own
    ],
)
def test_models_whose_experts_cannot_be_shared_are_refused_before_anything_starts(
    tmp_path: Path, role: str, ep: int, model: dict[str, object], said: str | None
) -> None:
    file = write_task(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **model}))
    overrides = [f"{role}.strategy={{kind: fsdp2, ep: {ep}}}", f"pools.all=0-{ep - 1}"]
    if role == "reference":
        overrides.append("reference.pool=all")
    loaded = load_config(file, ["cluster.platform=cpu", *overrides])
    told = [str(finding.error) for finding in inspect(loaded, {})]
    found = [error for error in told if error.startswith(f"{role}.strategy.ep: ")]
    assert len(found) == (said is not None)
    assert all(str(said) in error for error in found)
