"""The trainer's loss of further tokens is the one by hand, however a step is cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.convert.further_by_hand import COUNTS, Further, save_further, tensors_of
from tests.convert.spawned import run_ranks
from tests.convert.trainer_runs import (
    EPS,
    EXAMPLES,
    STEPS,
    run_all,
    sequences_by_hand,
    settings,
    steps_of,
    text_rows,
    tokenizer,
    train_by_hand,
    write_rows,
)

WEIGHT = 0.3
LAYOUTS = ({"ep": 2}, {"tp": 2, "etp": 1, "recompute": "full"}, {"pp": 2})
FREE = 4e-5
"""Largest difference of weights after the steps, of a learning rate of 3e-3."""


def loss_by_hand(model: Further, rows: Sequence[dict[str, Any]], weight: float = WEIGHT) -> Tensor:
    """Of all tokens that are trained on; a further layer predicts those that have as many tokens
    of their sequence before them as it looks ahead."""
    sums, count = [torch.zeros(()) for _ in range(1 + len(model.layers))], 0
    for row in rows:
        for tokens, trained in sequences_by_hand(row):
            row_T = torch.tensor(tokens)
            for k, logits in enumerate(model(row_T[None])):
                logprobs = logits[0].log_softmax(-1)
                for place in range(k + 1, len(tokens)):
                    if trained[place]:
                        sums[k] = sums[k] - logprobs[place - k - 1, row_T[place]]
            count += sum(trained)
    first, *further = (each / count for each in sums)
    return first + weight * torch.stack(further).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_further_tokens_are_trained_as_by_hand(name: str, tmp_path: Path) -> None:
    # Of text all is trained on, also what a further layer has too few tokens before.
    rows = text_rows(EXAMPLES * STEPS)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    folder, model = save_further(tmp_path, name)
    tokenizer().save_pretrained(folder)
    packings = (False,) if name == "qwen3_next" else (True, False)
    how: dict[str, Any] = {
        "method": "pretrain",
        "mtp_loss_weight": WEIGHT,
        "optimizer": {"eps": EPS},
    }
    runs = [
        settings(
            folder,
            data,
            tmp_path / f"{i}{packing}",
            layout=layout,
            batch={"packing": packing},
            **how,
        )
        for i, layout in enumerate(LAYOUTS)
        for packing in packings
    ]
    # One begins in a layout and goes on in another.
    how["batch"] = {"packing": packings[0]}
    begun = settings(folder, data, tmp_path / "moved", layout={"pp": 2}, steps=2, **how)
    runs.append(settings(folder, data, tmp_path / "moved", layout={"ep": 2}, resume="auto", **how))
    run_ranks(run_all, 2, [begun])
    run_ranks(run_all, 2, runs)
    expected, _ = train_by_hand(folder, rows, loss_by_hand, model, eps=EPS)
    after = tensors_of(model, name, tmp_path / "after")
    for run in runs:
        found = [s["loss"] + WEIGHT * s["mtp_loss"] for s in steps_of(run)]
        assert found == pytest.approx([loss for loss, _ in expected], abs=1e-5), run
        norms = [step["grad_norm"] for step in steps_of(run)]
        assert norms == pytest.approx([norm for _, norm in expected], rel=1e-4), run
        trained = load_file(run.output / "model" / "model.safetensors")
        assert trained.keys() == after.keys()
        worst = max(float((trained[key] - after[key]).abs().max()) for key in after)
        assert worst < FREE, run


def test_further_tokens_are_not_for_preferences_or_adapters(tmp_path: Path) -> None:
    for more, said in (
        ({"method": "dpo", "batch": {"tokens": 256}}, "but method is dpo"),
        ({"lora": {}}, "but lora is given"),
    ):
        with pytest.raises(ValueError, match=said):
            settings(tmp_path, tmp_path, tmp_path, mtp_loss_weight=0.1, **more)
