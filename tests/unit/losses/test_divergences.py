"""Divergences against loops over tokens, what must hold of any of them, and losses from them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.divergences import divergence
from roll.algorithms.loss_interface import PolicyTerms
from roll.algorithms.losses.distill import DistillLoss, DistillTerm
from roll.config.algorithm import DistillTermConfig
from roll.config.algorithm.divergences import (
    AdaptiveKlConfig,
    DistillLossConfig,
    DivergenceConfig,
    ForwardKlConfig,
    JensenShannonConfig,
    ReverseKlConfig,
    SkewedForwardConfig,
    SkewedReverseConfig,
)
from tests.tiny import rollout_batch

V = 7


def plain_kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def mixed(a: list[float], b: list[float], share: float) -> list[float]:
    return [share * x + (1 - share) * y for x, y in zip(a, b, strict=True)]


def adaptive(p: list[float], q: list[float], mass: float) -> float:
    order = sorted(range(len(p)), key=lambda i: -p[i])
    head, seen = set(), 0.0
    for i in order:
        if seen >= mass:
            break
        head.add(i)
        seen += p[i]
    gaps = [abs(x - y) for x, y in zip(p, q, strict=True)]
    share = sum(gaps[i] for i in head) / sum(gaps)
    return share * plain_kl(p, q) + (1 - share) * plain_kl(q, p)


def jensen_shannon(p: list[float], q: list[float], beta: float) -> float:
    between = mixed(p, q, beta)
    return beta * plain_kl(p, between) + (1 - beta) * plain_kl(q, between)


BY_HAND: list[tuple[DivergenceConfig, Callable[[list[float], list[float]], float]]] = [
    (ForwardKlConfig(), plain_kl),
    (ReverseKlConfig(), lambda p, q: plain_kl(q, p)),
    (JensenShannonConfig(), lambda p, q: jensen_shannon(p, q, 0.5)),
    (JensenShannonConfig(beta=0.2), lambda p, q: jensen_shannon(p, q, 0.2)),
    (SkewedForwardConfig(alpha=0.3), lambda p, q: plain_kl(p, mixed(p, q, 0.3))),
    (SkewedReverseConfig(alpha=0.3), lambda p, q: plain_kl(q, mixed(q, p, 0.3))),
    (AdaptiveKlConfig(), lambda p, q: adaptive(p, q, 0.5)),
    (AdaptiveKlConfig(head_mass=0.9), lambda p, q: adaptive(p, q, 0.9)),
]
CONFIGS = [config for config, _ in BY_HAND]


def log_distributions(seed: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    draw = torch.randn(2, rows, V, generator=g, dtype=torch.float64) * 2
    teacher, student = draw.log_softmax(-1)
    return teacher, student


@pytest.mark.parametrize(("config", "by_hand"), BY_HAND)
@given(seed=st.integers(0, 999))
@settings(max_examples=20)
def test_each_is_its_formula(
    config: DivergenceConfig, by_hand: Callable[[list[float], list[float]], float], seed: int
) -> None:
    teacher, student = log_distributions(seed)
    found = divergence(config, teacher, student).tolist()
    pairs = zip(teacher.exp().tolist(), student.exp().tolist(), strict=True)
    assert found == pytest.approx([by_hand(p, q) for p, q in pairs], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("config", CONFIGS)
def test_equal_distributions_are_no_distance_apart_and_pull_nowhere(
    config: DivergenceConfig,
) -> None:
    teacher, _ = log_distributions(1)
    logits = teacher.clone().requires_grad_()
    found = divergence(config, teacher, logits.log_softmax(-1))
    assert found.abs().max() < 1e-12
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-12


@pytest.mark.parametrize("config", CONFIGS)
def test_following_the_gradient_brings_the_student_to_its_teacher(config: DivergenceConfig) -> None:
    teacher, student = log_distributions(2)
    logits = student.clone().requires_grad_()
    first = divergence(config, teacher, logits.log_softmax(-1)).sum().item()
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        loss = divergence(config, teacher, logits.log_softmax(-1)).sum()
        loss.backward()
        optimizer.step()
    assert 0 <= loss.item() < 1e-3 * first


@pytest.mark.parametrize("config", CONFIGS)
def test_a_token_that_one_side_rules_out_gives_no_nan(config: DivergenceConfig) -> None:
    certain = torch.full((1, V), -200.0).index_fill_(1, torch.tensor([0]), 0.0).log_softmax(-1)
    other = certain.roll(1, -1).requires_grad_()
    found = divergence(config, certain, other)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert other.grad is not None
    assert torch.isfinite(other.grad).all()


def test_the_loss_is_the_divergence_and_the_likelihood_with_their_coefficients() -> None:
    batch = rollout_batch()
    mask_BT = batch.loss_mask
    logprobs_BT = (-torch.rand(mask_BT.shape) - 0.1).masked_fill(~mask_BT, torch.nan)
    logprobs_BT.requires_grad_()
    divergence_BT = torch.rand(mask_BT.shape, requires_grad=True)
    terms = PolicyTerms(logprobs_BT, divergence_BT=divergence_BT)
    found = DistillLoss(DistillLossConfig(coef=2.0, sft_coef=0.3))(terms, batch)
    expected_BT = torch.where(mask_BT, 2 * divergence_BT - 0.3 * logprobs_BT, 0.0)
    torch.testing.assert_close(found.loss_BT, expected_BT)
    assert list(found.parts_BT) == ["distill", "sft"]
    torch.testing.assert_close(sum(found.parts_BT.values()), found.loss_BT.detach())
    told = found.metrics_BT
    torch.testing.assert_close(told["divergence"][mask_BT], divergence_BT[mask_BT].detach())
    torch.testing.assert_close(told["nll"][mask_BT], -logprobs_BT[mask_BT].detach())
    kept = [*found.parts_BT.values(), *told.values()]
    assert not any(each_BT.requires_grad for each_BT in kept)


def test_without_imitation_the_likelihood_is_only_told() -> None:
    batch = rollout_batch()
    logprobs_BT, divergence_BT = -torch.rand(2, *batch.loss_mask.shape)
    found = DistillLoss(DistillLossConfig())(
        PolicyTerms(logprobs_BT, divergence_BT=-divergence_BT), batch
    )
    assert list(found.parts_BT) == ["distill"]
    torch.testing.assert_close(found.loss_BT, -divergence_BT * batch.loss_mask)
    assert "nll" in found.metrics_BT


def test_beside_a_policy_loss_it_is_the_divergence_itself() -> None:
    batch = rollout_batch()
    divergence_BT = torch.rand(batch.loss_mask.shape, requires_grad=True)
    zeros_BT = torch.zeros_like(divergence_BT)
    term = DistillTerm(DistillTermConfig(coef=0.5))
    found = term(PolicyTerms(zeros_BT, divergence_BT=divergence_BT), batch)
    assert torch.equal(found.loss_BT, divergence_BT)
    assert torch.equal(found.metrics_BT["distill/divergence"], divergence_BT.detach())
    assert not found.metrics_BT["distill/divergence"].requires_grad
    with pytest.raises(ValueError, match="no teacher said anything"):
        term(PolicyTerms(zeros_BT), batch)
