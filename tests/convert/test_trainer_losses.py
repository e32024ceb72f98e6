"""The trainer's steps are those of Hugging Face and PyTorch, in every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_adapter.errors import ConfigError
from mcore_adapter.train.losses import pair_sums
from mcore_adapter.train.schedule import lr_at
from mcore_adapter.train.settings import Dpo, Optimizer, Settings
from tests.convert.spawned import run_ranks
from tests.convert.trainer_runs import (
    EPS,
    EXAMPLES,
    STEPS,
    chat_rows,
    hf_model,
    likelihood_by_hand,
    pair_rows,
    preference_by_hand,
    run_all,
    settings,
    steps_of,
    text_rows,
    train_by_hand,
    trainable,
    write_rows,
)

BETA, SMOOTHING = 0.5, 0.1


def assert_steps(run: Settings, expected: list[tuple[float, float]]) -> None:
    found = [(step["loss"], step["grad_norm"]) for step in steps_of(run)]
    assert len(found) == STEPS
    for (loss, norm), (loss_by_hand, norm_by_hand) in zip(found, expected, strict=True):
        assert loss == pytest.approx(loss_by_hand, abs=1e-5), run
        assert norm == pytest.approx(norm_by_hand, rel=1e-4), run


@pytest.mark.slow
def test_fine_tuning_is_that_of_hugging_face_in_every_layout(tmp_path: Path) -> None:
    rows = chat_rows(EXAMPLES * STEPS)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    names = ("qwen3_tied", "qwen3_moe", "qwen3_next")
    dense, sparse, linear = (trainable(tmp_path, name) for name in names)
    layouts: list[tuple[Path, dict[str, Any]]] = [
        (dense, {"layout": {}}),
        (dense, {"layout": {"distributed_optimizer": True}}),
        (dense, {"layout": {"tp": 2, "sequence_parallel": True, "recompute": "full"}}),
        (dense, {"layout": {"tp": 2}, "batch": {"packing": False}}),
        (dense, {"layout": {"pp": 2}}),
        (dense, {"layout": {"pp": 2}, "batch": {"packing": False}}),
        (dense, {"layout": {"pp": 2, "vpp": 2}}),
        (sparse, {"layout": {"ep": 2}}),
        (sparse, {"layout": {"tp": 2, "etp": 1}}),
        (linear, {"layout": {}, "batch": {"packing": False}}),
    ]
    runs = [
        settings(model, data, tmp_path / f"run{i}", optimizer={"eps": EPS}, **more)
        for i, (model, more) in enumerate(layouts)
    ]
    run_ranks(run_all, 2, runs)
    expected = {model: train_by_hand(model, rows, eps=EPS) for model in (dense, sparse, linear)}
    for run in runs:
        steps, after = expected[run.model]
        assert_steps(run, steps)
        # What is exported is what was trained.
        assert likelihood(run.output / "model", rows) == pytest.approx(after, abs=1e-5), run
        assert after < likelihood(run.model, rows) - 0.1


@pytest.mark.slow
def test_pretraining_and_dpo_are_those_of_hugging_face(tmp_path: Path) -> None:
    texts, pairs = text_rows(EXAMPLES * STEPS), pair_rows(EXAMPLES * STEPS)
    text_data = write_rows(tmp_path / "text.jsonl", texts)
    pair_data = write_rows(tmp_path / "pairs.jsonl", pairs)
    model = trainable(tmp_path, "qwen3_tied")
    dpo: dict[str, Any] = {"method": "dpo", "dpo": {"beta": BETA, "label_smoothing": SMOOTHING}}
    pretrain: dict[str, Any] = {"method": "pretrain", "data": {"validation": str(text_data)}}
    one = [
        settings(model, text_data, tmp_path / "pretrain1", **pretrain),
        settings(model, pair_data, tmp_path / "dpo1", **dpo),
    ]
    two = [
        settings(model, text_data, tmp_path / "pretrain2", **pretrain),
        settings(model, pair_data, tmp_path / "dpo2", **dpo),
        settings(model, pair_data, tmp_path / "dpo3", **dpo, batch={"packing": False}),
        settings(model, pair_data, tmp_path / "dpo4", **dpo, layout={"pp": 2}),
        settings(model, pair_data, tmp_path / "dpo5", **dpo, layout={"tp": 2}),
    ]
    run_ranks(run_all, 1, one)
    run_ranks(run_all, 2, two)
    losses = {
        "pretrain": train_by_hand(model, texts),
        "dpo": train_by_hand(model, pairs, preference_by_hand(BETA, SMOOTHING, hf_model(model))),
    }
    for run in [*one, *two]:
        steps, after = losses[run.method]
        assert_steps(run, steps)
        if run.method == "dpo":
            # The policy is its own reference, and smoothing changes nothing at a margin of zero.
            assert steps_of(run)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        else:
            lines = (run.output / "metrics.jsonl").read_text().splitlines()
            validated = [json.loads(line)["validation/loss"] for line in (lines[0], lines[-1])]
            assert validated == pytest.approx([likelihood(model, texts), after], abs=1e-5)


@torch.no_grad()
def likelihood(folder: Path, rows: list[dict[str, Any]]) -> float:
    return likelihood_by_hand(hf_model(folder), rows).item()


def refusal(run: Settings) -> str:
    with pytest.raises(ConfigError) as caught:
        run_all([run])
    return str(caught.value)


def test_linear_attention_refuses_packed_sequences(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "x.jsonl", chat_rows(EXAMPLES))
    run = settings(trainable(tmp_path, "qwen3_next"), data, tmp_path / "out")
    (said,) = run_ranks(refusal, 1, run)
    assert "say batch.packing=false" in said


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    model = trainable(tmp_path, "qwen3")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    run = settings(model, write_rows(tmp_path / "x.jsonl", chat_rows(EXAMPLES)), tmp_path / "out")
    run_ranks(run_all, 1, [run])
    assert [step["skipped_steps"] for step in steps_of(run)] == [1, 2, 3]
    after = load_file(run.output / "model" / "model.safetensors")
    assert all(torch.equal(after[name], weight) for name, weight in weights.items())


def test_the_loss_of_pairs_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    policy_S, reference_S = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    found = pair_sums(policy_S, reference_S, Dpo(beta=BETA, label_smoothing=SMOOTHING))
    total, right = 0.0, 0
    for c, r in zip(range(0, 8, 2), range(1, 8, 2), strict=True):
        ratio = lambda i: float(policy_S[i] - reference_S[i])  # noqa: E731
        margin = BETA * (ratio(c) - ratio(r))
        sigmoid = 1 / (1 + math.exp(-margin))
        total -= (1 - SMOOTHING) * math.log(sigmoid) + SMOOTHING * math.log(1 - sigmoid)
        right += margin > 0
    assert float(found["loss"]) == pytest.approx(total)
    assert int(found["accuracy"]) == right


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.6, 0.2]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.6, 0.2]),
    ],
)
def test_the_learning_rate_warms_up_and_decays(
    schedule: Literal["constant", "linear", "cosine"], expected: list[float]
) -> None:
    least = 0.0 if schedule == "constant" else 0.2
    how = Optimizer(lr=1.0, schedule=schedule, warmup_steps=2, min_lr=least)
    assert [lr_at(step, how, 5) for step in range(5)] == pytest.approx(expected)
