"""Universal logit distillation (arXiv 2402.12030) against permutations and whole logits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from roll.algorithms.divergences import divergence
from roll.algorithms.teacher_divergence import (
    Comparison,
    TeacherOutputs,
    divergences,
    top_logprobs,
)
from roll.config.algorithm.divergences import UldConfig
from roll.core.teacher_outputs import OutputHead

N, D = 7, 5
OURS, THEIRS = 11, 9
"""Tokens of student and teacher, of which both models have two logits more."""


def distribution(masses: list[int]) -> list[float]:
    return [mass / sum(masses) for mass in masses]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@settings(max_examples=60)
def test_it_is_the_cheapest_way_to_match_the_probabilities(
    ours: list[int], theirs: list[int]
) -> None:
    """The minimum over all assignments of tokens to tokens; a missing token has probability 0."""
    p, q = distribution(theirs), distribution(ours)
    width = max(len(p), len(q))
    padded = [each + [0.0] * (width - len(each)) for each in (p, q)]
    best = min(
        math.fsum(abs(a - b) for a, b in zip(padded[0], order, strict=True))
        for order in itertools.permutations(padded[1])
    )
    logs = (torch.tensor(each, dtype=torch.float64).log() for each in (p, q))
    found = divergence(UldConfig(), *logs)
    assert found.item() == pytest.approx(best, abs=1e-12)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_sorting(ours_NV: Tensor, theirs_NV: Tensor, top_k: int | None) -> Tensor:
    """From whole probabilities."""
    q, p = (each.sort(-1, descending=True).values for each in (ours_NV, theirs_NV))
    if top_k is None:
        q = torch.nn.functional.pad(q, [0, max(0, p.shape[1] - q.shape[1])])
        p = torch.nn.functional.pad(p, [0, max(0, q.shape[1] - p.shape[1])])
        return (p - q).abs().sum(-1)
    rest = (p[:, top_k:].sum(-1) - q[:, top_k:].sum(-1)).abs()
    return (p[:, :top_k] - q[:, :top_k]).abs().sum(-1) + rest


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize(("ours", "theirs"), [(OURS, THEIRS), (THEIRS, OURS)])
def test_a_teacher_with_other_tokens_teaches_by_its_own_head(
    top_k: int | None, ours: int, theirs: int
) -> None:
    hidden, weight = draw(N, D, seed=0).float(), 2 * draw(ours + 2, D, seed=1).float()
    states, head = draw(N, D + 1, seed=2).float(), 2 * draw(theirs + 2, D + 1, seed=3).float()
    hidden.requires_grad_()
    weight.requires_grad_()
    logp = (linear(states, head)[:, :theirs] / 0.8).log_softmax(-1)
    index_M = torch.tensor([0, 2, 3, 6])
    told = TeacherOutputs(
        index_M,
        (states[index_M],) if top_k is None else top_logprobs(logp[index_M], top_k),
        OutputHead(head, None, 1.0, num_tokens=theirs) if top_k is None else None,
    )
    compared = Comparison(UldConfig(), 1.3, 0.8, ours)
    found = divergences(hidden, weight, None, [told], compared, divisor=1.0, chunk_tokens=3)
    up = torch.arange(1.0, N + 1)
    (found * up).sum().backward()

    wide, wide_weight = (each.detach().double().requires_grad_() for each in (hidden, weight))
    q = (linear(wide, wide_weight)[:, :ours] / 1.3).softmax(-1)
    wanted = torch.zeros(N, dtype=torch.float64)
    wanted = wanted.index_put((index_M,), by_sorting(q, logp.double().exp(), top_k)[index_M])
    (wanted * up).sum().backward()
    torch.testing.assert_close(found.double(), wanted.detach(), atol=1e-5, rtol=1e-5)
    assert found[index_M].min() > 0.01
    for leaf, other in ((hidden, wide), (weight, wide_weight)):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), other.grad, atol=1e-4, rtol=1e-4)
