"""Runs on a mixture of experts, outside of Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from roll.commands.merge import merge
from roll.config.sections.model import ModelConfig
from roll.strategy.hf_folder import read_checkpoint
from tests.runs import run_local, without_times, write_task
from tests.tiny import save_tiny_model

FSDP2 = {"kind": "fsdp2"}
ZERO_3 = {"kind": "deepspeed", "stage": 3, "whole_below_elements": 64}
on_each = pytest.mark.parametrize("strategy", [FSDP2, ZERO_3], ids=["fsdp2", "deepspeed"])
LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
WATCHED = {"tensorboard": False, "verify_weights": "always"}


def write_experts_task(folder: Path, strategy: dict[str, Any], **changes: Any) -> Path:
    train = {"pool": "all", "strategy": strategy, "optimizer": {"lr": 1e-2}}
    path = write_task(
        folder, **{"actor_train": train, "track": WATCHED, "validation": {}} | changes
    )
    save_tiny_model(folder / "model", experts=True)
    return path


def assert_engine_agrees(records: list[dict[str, Any]]) -> None:
    steps = [r for r in records if "mismatch/logprob_abs_max" in r]
    assert len(steps) > 1
    assert all(record["mismatch/logprob_abs_max"] < 1e-4 for record in steps)
    assert all(record["grad_norm"] > 0 for record in steps)


@pytest.mark.slow
@on_each
def test_vllm_generates_with_the_experts_that_were_trained(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    infer = {"pool": "all", "strategy": {"kind": "vllm"}}
    path = write_experts_task(
        tmp_path, strategy, actor_infer=infer, reference=None, algorithm={}, max_steps=3
    )
    assert_engine_agrees(run_local(path))


@on_each
def test_a_run_resumes_exports_and_merges(tmp_path: Path, strategy: dict[str, Any]) -> None:
    runs = []
    for name in ("whole", "halves"):
        path = write_experts_task(tmp_path / name, strategy)
        if name == "halves":
            run_local(path, ["max_steps=2"])
        runs.append(run_local(path))
    assert_engine_agrees(runs[0])
    assert [without_times(r) for r in runs[0]] == [without_times(r) for r in runs[1]]
    folder = tmp_path / "whole"
    merge(folder / "out", tmp_path / "merged")
    started, exported, merged = (
        read_checkpoint(ModelConfig(path=str(path))).shapes
        for path in (folder / "model", folder / "out" / "hf", tmp_path / "merged")
    )
    assert started == exported == merged
    tokens = torch.arange(4, 20)[None]
    models = [
        AutoModelForCausalLM.from_pretrained(path)
        for path in (folder / "out" / "hf", tmp_path / "merged")
    ]
    assert torch.equal(models[0](tokens).logits, models[1](tokens).logits)


@on_each
def test_an_adapter_leaves_merged_into_a_mixture_of_experts(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    model = {"path": str(tmp_path / "model"), "lora": LORA}
    records = run_local(write_experts_task(tmp_path, strategy, model=model, reference=None))
    assert_engine_agrees(records)
    assert records[-2]["kl/ref"] > 0
    assert (tmp_path / "out" / "hf" / "adapter_model.safetensors").is_file()
