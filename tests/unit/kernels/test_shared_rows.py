"""Context parallel ranks in run files: `roll check` refuses models whose rows they cannot share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.commands.preflight import inspect
from roll.config import load_config
from tests.runs import write_task

QWEN3 = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}


@pytest.mark.parametrize(
    ("cp", "tp", "model", "said"),
    [
        (2, 1, QWEN3, None),
        (4, 1, QWEN3, None),
        (4, 2, QWEN3, "cp = 4: each tensor parallel rank has 2 heads of queries and 1 of keys"),
        (2, 1, {"model_type": "qwen3_next"}, "cp = 2: a qwen3_next has gated delta nets"),
        (2, 1, {"model_type": "bert"}, "model_type 'bert' is not supported"),
        (1, 1, {"model_type": "qwen3_next"}, None),
    ],
)
def test_models_whose_rows_cannot_be_shared_are_refused_before_anything_starts(
    tmp_path: Path, cp: int, tp: int, model: dict[str, object], said: str | None
) -> None:
    file = write_task(tmp_path)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **model}))
    strategy = f"{{kind: megatron, cp: {cp}, tp: {tp}, sequence_parallel: null}}"
    overrides = [f"actor_train.strategy={strategy}", f"pools.all=0-{cp * tp - 1}"]
    loaded = load_config(file, ["cluster.platform=cpu", *overrides])
    told = [str(finding.error) for finding in inspect(loaded, {})]
    found = [error for error in told if error.startswith("actor_train.strategy: ")]
    assert len(found) == (said is not None)
    assert all(str(said) in error for error in found)
