"""Training steps follow those of Hugging Face and PyTorch in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.learner import Learner
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import rows, save_model, targets

STEPS, LR, CLIP, DECAY = 5, 3e-3, 0.5, 10.0


def by_hand(folder: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of PyTorch's AdamW."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.dim() > 1 and "bias" not in name]
    others = [p for name, p in named if p.dim() == 1 or "bias" in name]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
    )
    losses, norms = [], []
    for _ in range(STEPS):
        logits = model(input_ids=rows(), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets(rows()).flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train(
    cases: list[tuple[Path, ParallelSizes, bool]],
) -> list[tuple[list[float], list[float]]]:
    """Losses (on the last stage; of all data parallel ranks) and gradient norms."""
    found = []
    for folder, sizes, distributed in cases:
        learner = Learner.build(
            folder,
            sizes,
            distributed=distributed,
            lr=1.0,
            weight_decay=DECAY,
            max_grad_norm=CLIP,
        )
        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(learner.backward())
            norms.append(learner.step(lr=LR).grad_norm)
        found.append(([loss for loss in losses if loss is not None], norms))
    return found


def skips(folder: Path, distributed: bool) -> list[bool]:
    """Whether nothing changes with gradients that are not finite, and with those of zero."""
    found = []
    learner = Learner.build(folder, ParallelSizes(), distributed=distributed)
    learner.backward()
    learner.step()
    parameters = list(learner.chunks[0].parameters())
    before = [p.detach().clone() for p in parameters]
    for value in (torch.inf, torch.nan, 0.0):
        parameters[0].main_grad.fill_(value)
        skipped = learner.step().skipped
        same = all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
        cleared = all(not p.main_grad.any() for p in parameters)
        found.append(skipped and same and cleared)
    return found


@pytest.mark.slow
def test_losses_and_gradient_norms_are_those_of_pytorch(tmp_path: Path) -> None:
    layouts = (
        (ParallelSizes(), False),
        (ParallelSizes(), True),
        (ParallelSizes(tp=2), False),
        (ParallelSizes(pp=2), False),
        (ParallelSizes(pp=2), True),
    )
    folders = [save_model(tmp_path, name) for name in ("qwen3_tied", "qwen3_moe")]
    cases = [(folder, *layout) for folder in folders for layout in layouts]
    cases += [(folders[1], ParallelSizes(ep=2), flag) for flag in (False, True)]
    # Its experts have biases, which no tensor parallel rank counts for another.
    oss = save_model(tmp_path, "gpt_oss")
    cases += [(oss, ParallelSizes(tp=2, ep=2, etp=1), flag) for flag in (False, True)]
    answers = run_ranks(train, 2, cases)
    for i, case in enumerate(cases):
        losses, norms = by_hand(case[0])
        for answer in answers:
            assert answer[i][1] == pytest.approx(norms, rel=1e-4), case
            assert not answer[i][0] or answer[i][0] == pytest.approx(losses, rel=1e-4), case
        assert any(answer[i][0] for answer in answers)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_gradient_of_zero_or_that_is_not_finite_is_no_step(
    distributed: bool, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, "qwen3")
    assert run_ranks(skips, 1, folder, distributed) == [[True, True, True]]
