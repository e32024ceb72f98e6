"""Runs that train an adapter: their reference, their checkpoints, what they leave, and `merge`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from roll.commands.merge import merge
from roll.core.errors import CheckpointError, ConfigError
from tests.families import save
from tests.pipelines.test_rows import PAIRS, TEXTS, split
from tests.runs import run_local, without_times, write_rows_task, write_task

LORA = {"rank": 4, "alpha": 8.0}
ZERO_3 = {"kind": "deepspeed", "stage": 3, "whole_below_elements": 64}
FSDP2, MEGATRON = {"kind": "fsdp2"}, {"kind": "megatron"}
on_each = pytest.mark.parametrize(
    "strategy", [FSDP2, ZERO_3, MEGATRON], ids=["fsdp2", "deepspeed", "megatron"]
)


def with_adapter(path: Path) -> dict[str, Any]:
    return {"path": str(path / "model"), "lora": LORA}


@on_each
def test_preferences_are_compared_with_the_base_of_the_adapter(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    path = write_rows_task(
        tmp_path,
        "dpo",
        split(PAIRS),
        model=with_adapter(tmp_path),
        max_steps=20,
        actor_train={"pool": "all", "strategy": strategy, "optimizer": {"lr": 1e-2}},
    )
    records = run_local(path)
    assert records[0]["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert records[-1]["val/held_out/accuracy"] >= 0.9
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "hf").eval()
    merge(tmp_path / "out", tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokens = torch.arange(4, 20)[None]
    torch.testing.assert_close(whole(tokens).logits, adapted(tokens).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="exists"):
        merge(tmp_path / "out", tmp_path / "merged")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        merge(tmp_path / "model", tmp_path / "elsewhere")


@on_each
def test_a_policy_that_is_an_adapter_needs_no_reference_role(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    train = {"pool": "all", "strategy": strategy, "optimizer": {"lr": 1e-3, "warmup_steps": 2}}
    path = write_task(tmp_path, model=with_adapter(tmp_path), reference=None, actor_train=train)
    records = run_local(path)
    assert records[0]["kl/ref"] == pytest.approx(0, abs=1e-7)
    assert records[-2]["kl/ref"] > 0
    # The engine answers with the merged weights: its log-probs are the trainer's.
    assert all(record["mismatch/logprob_abs_mean"] < 1e-4 for record in records[:-1])
    assert (tmp_path / "out" / "hf" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@on_each
def test_vllm_serves_the_adapter_as_it_is(tmp_path: Path, strategy: dict[str, Any]) -> None:
    path = write_task(
        tmp_path,
        model={**with_adapter(tmp_path), "lora": {**LORA, "serve": "adapter"}},
        reference=None,
        actor_train={"pool": "all", "strategy": strategy, "optimizer": {"lr": 1e-2}},
        actor_infer={"pool": "all", "strategy": {"kind": "vllm", "max_lora_rank": 8}},
        track={"tensorboard": False, "verify_weights": "always"},
    )
    records = run_local(path)
    assert records[-2]["kl/ref"] > 1e-4  # so the adapter is more than rounding
    assert all(record["mismatch/logprob_abs_max"] < 1e-4 for record in records[:-1])


@on_each
def test_two_halves_of_an_adapter_are_the_whole(tmp_path: Path, strategy: dict[str, Any]) -> None:
    runs = []
    for name in ("whole", "halves"):
        folder = tmp_path / name
        model = {**with_adapter(folder), "lora": {**LORA, "dropout": 0.1}}
        train = {"pool": "all", "strategy": strategy, "optimizer": {"lr": 1e-3}}
        path = write_rows_task(folder, "sft", split(TEXTS), model=model, actor_train=train)
        if name == "halves":
            run_local(path, ["max_steps=2"])
        runs.append([without_times(record) for record in run_local(path)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("pipeline", ["sft", "reward_model"])
def test_merge_writes_what_a_run_exports(tmp_path: Path, pipeline: str) -> None:
    rows = TEXTS if pipeline == "sft" else PAIRS
    run_local(write_rows_task(tmp_path, pipeline, split(rows)))
    merge(tmp_path / "out" / "checkpoints" / "step_000004", tmp_path / "merged")
    one, other = (
        (folder / "model.safetensors").read_bytes()
        for folder in (tmp_path / "merged", tmp_path / "out" / "hf")
    )
    assert one == other


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_merge_reads_a_model_that_sdpa_does_not_compute(tmp_path: Path, family: str) -> None:
    save(tmp_path / "model", family)
    model = {"path": str(tmp_path / "model"), "attention": "eager"}
    run_local(write_rows_task(tmp_path, "sft", split(TEXTS), model=model, max_steps=1))
    merge(tmp_path / "out", tmp_path / "merged")
    one, other = (
        (folder / "model.safetensors").read_bytes()
        for folder in (tmp_path / "merged", tmp_path / "out" / "hf")
    )
    assert one == other


@on_each
def test_a_reward_model_is_an_adapter_and_a_head(tmp_path: Path, strategy: dict[str, Any]) -> None:
    path = write_rows_task(
        tmp_path,
        "reward_model",
        split(PAIRS),
        model=with_adapter(tmp_path),
        max_steps=20,
        actor_train={"pool": "all", "strategy": strategy, "optimizer": {"lr": 1e-2}},
    )
    assert run_local(path)[-1]["val/held_out/accuracy"] >= 0.9
    merge(tmp_path / "out", tmp_path / "merged")
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "hf").eval()
    tokens = torch.arange(4, 20)[None]
    scores = whole(tokens).logits
    assert scores.abs().item() > 0.01
    torch.testing.assert_close(scores, adapted(tokens).logits, atol=1e-5, rtol=1e-5)
