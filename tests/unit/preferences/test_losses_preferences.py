"""Losses of preferences against formulas worked by hand, and against how batches are split."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from roll.algorithms.loss_interface import PolicyTerms, ScoreTerms, TokenLoss
from roll.algorithms.losses.preferences import LabelledLoss, PairedLoss
from roll.algorithms.losses.ranking import BradleyTerryLoss
from roll.algorithms.losses.text import TextLoss
from roll.algorithms.weights import token_weights
from roll.config.algorithm import Aggregation
from roll.config.algorithm.preferences import (
    BradleyTerryConfig,
    HingeConfig,
    IpoConfig,
    KtoConfig,
    OrpoConfig,
    PairLoss,
    RobustConfig,
    SigmoidConfig,
    SimpoConfig,
)
from roll.core.batches import LabelledBatch, PreferenceBatch

PAIRS, T = 3, 7


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def logsig(x: float) -> float:
    return math.log(sigmoid(x))


def log_odds(logp: float) -> float:
    return logp - math.log(1 - math.exp(logp))


CASES: list[tuple[PairLoss, Any]] = [
    (SigmoidConfig(beta=0.3), lambda c, r: -logsig(0.3 * (c - r))),
    (
        SigmoidConfig(beta=0.3, label_smoothing=0.2),
        lambda c, r: -0.8 * logsig(0.3 * (c - r)) - 0.2 * logsig(0.3 * (r - c)),
    ),
    (
        RobustConfig(beta=0.3, label_smoothing=0.2),
        lambda c, r: (-0.8 * logsig(0.3 * (c - r)) + 0.2 * logsig(0.3 * (r - c))) / 0.6,
    ),
    (HingeConfig(beta=0.3), lambda c, r: max(0.0, 1 - 0.3 * (c - r))),
    (IpoConfig(beta=0.3), lambda c, r: (c - r - 1 / 0.6) ** 2),
    (SimpoConfig(beta=2.0, gamma=0.5), lambda c, r: -logsig(2 * (c - r) - 0.5)),
    (OrpoConfig(beta=0.3, sft_coef=0.0), lambda c, r: -0.3 * logsig(log_odds(c) - log_odds(r))),
]


def batch(seed: int = 0) -> tuple[PreferenceBatch, torch.Tensor]:
    """Pairs of several lengths, and the policy's log-probs."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, T + 1, (2 * PAIRS,), generator=g)
    at = torch.arange(T)
    mask = (at >= 2) & (at < lengths[:, None])
    made = PreferenceBatch(
        tokens=torch.zeros(2 * PAIRS, T, dtype=torch.long),
        lengths=lengths,
        loss_mask=mask,
        margins=torch.rand(PAIRS, generator=g).repeat_interleave(2),
        ref_sums=-3 * torch.rand(2 * PAIRS, generator=g) - 1,
    )
    return made, -2 * torch.rand(2 * PAIRS, T, generator=g) - 0.05


def reduced(loss: TokenLoss, of: PreferenceBatch | LabelledBatch) -> torch.Tensor:
    weights = token_weights(of.loss_mask, Aggregation.SEQUENCE_MEAN)
    return (loss.loss_BT.masked_fill(weights == 0, 0.0) * weights).sum()


@pytest.mark.parametrize(("config", "formula"), CASES, ids=lambda x: getattr(x, "kind", ""))
def test_the_loss_is_the_mean_over_pairs_of_the_papers_formula(
    config: PairLoss, formula: Any
) -> None:
    pairs, logprobs = batch()
    rewards = []
    for row in range(2 * PAIRS):
        values = [logprobs[row, t].item() for t in range(T) if pairs.loss_mask[row, t]]
        value = sum(values)
        if config.needs_reference:
            assert pairs.ref_sums is not None
            value -= pairs.ref_sums[row].item()
        rewards.append(value / len(values) if config.average_logprobs else value)
    want = sum(formula(rewards[2 * p], rewards[2 * p + 1]) for p in range(PAIRS)) / PAIRS
    got = PairedLoss(config)(PolicyTerms(logprobs), pairs)
    assert reduced(got, pairs).item() == pytest.approx(want, rel=1e-5)
    right = sum(rewards[2 * p] > rewards[2 * p + 1] for p in range(PAIRS)) / PAIRS
    assert got.metrics_B["accuracy"].mean().item() == pytest.approx(right)
    gap = sum(rewards[2 * p] - rewards[2 * p + 1] for p in range(PAIRS)) / PAIRS
    assert got.metrics_B["margin"].mean().item() == pytest.approx(config.beta * gap, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "value"),
    [
        (SigmoidConfig(), math.log(2)),
        (SigmoidConfig(label_smoothing=0.3), math.log(2)),
        (RobustConfig(label_smoothing=0.3), math.log(2)),
        (HingeConfig(), 1.0),
        (IpoConfig(beta=0.5), 1.0),
    ],
)
def test_a_policy_that_is_its_reference_has_the_known_loss(config: PairLoss, value: float) -> None:
    pairs, logprobs = batch()
    sums = logprobs.masked_fill(~pairs.loss_mask, 0).sum(1)
    got = PairedLoss(config)(PolicyTerms(logprobs), replace(pairs, ref_sums=sums))
    assert reduced(got, pairs).item() == pytest.approx(value, abs=1e-6)
    assert (got.metrics_B["accuracy"] == 0.5).all()


def test_imitation_is_added_for_the_chosen_responses_alone() -> None:
    pairs, logprobs = batch()
    plain = reduced(PairedLoss(SigmoidConfig())(PolicyTerms(logprobs), pairs), pairs)
    both = PairedLoss(SigmoidConfig(sft_coef=0.7))(PolicyTerms(logprobs), pairs)
    means = [logprobs[row][pairs.loss_mask[row]].mean().item() for row in range(0, 2 * PAIRS, 2)]
    want = plain.item() - 0.7 * sum(means) / PAIRS
    assert reduced(both, pairs).item() == pytest.approx(want, rel=1e-5)
    shares = [reduced(TokenLoss(part), pairs).item() for part in both.parts_BT.values()]
    assert list(both.parts_BT) == ["preference", "sft"]
    assert shares == pytest.approx([plain.item(), want - plain.item()], rel=1e-5)


def test_kto_weighs_wanted_and_unwanted_responses_around_the_divergence() -> None:
    pairs, logprobs = batch()
    wanted = [True, False, False, True, True, False]
    labelled = LabelledBatch(
        tokens=pairs.tokens,
        lengths=pairs.lengths,
        loss_mask=pairs.loss_mask,
        desirable=torch.tensor(wanted),
        ref_sums=pairs.ref_sums,
        divergence=torch.full((2 * PAIRS,), 0.4),
    )
    config = KtoConfig(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    want = 0.0
    for row, good in enumerate(wanted):
        assert pairs.ref_sums is not None
        reward = logprobs[row][pairs.loss_mask[row]].sum().item() - pairs.ref_sums[row].item()
        if good:
            want += 1.5 * (1 - sigmoid(0.3 * (reward - 0.4)))
        else:
            want += 0.5 * (1 - sigmoid(0.3 * (0.4 - reward)))
    got = LabelledLoss(config)(PolicyTerms(logprobs), labelled)
    assert reduced(got, labelled).item() == pytest.approx(want / 6, rel=1e-5)


def test_kto_of_a_policy_that_is_its_reference_is_a_half() -> None:
    pairs, logprobs = batch()
    labelled = LabelledBatch(
        tokens=pairs.tokens,
        lengths=pairs.lengths,
        loss_mask=pairs.loss_mask,
        desirable=torch.arange(6) % 2 == 0,
        ref_sums=logprobs.masked_fill(~pairs.loss_mask, 0).sum(1),
        divergence=torch.zeros(6),
    )
    got = LabelledLoss(KtoConfig())(PolicyTerms(logprobs), labelled)
    assert reduced(got, labelled).item() == pytest.approx(0.5, abs=1e-6)
    assert (got.metrics_B["accuracy"] == 0.5).all()


def test_bradley_terry_takes_margins_and_centres() -> None:
    pairs, scores = batch()
    last = torch.arange(T) == pairs.lengths[:, None] - 1
    pairs = replace(pairs, loss_mask=last)
    want = 0.0
    for p in range(PAIRS):
        c, r = (scores[row, pairs.lengths[row] - 1].item() for row in (2 * p, 2 * p + 1))
        assert pairs.margins is not None
        want += -logsig(c - r - pairs.margins[2 * p].item()) + 0.1 * (c + r) ** 2
    got = BradleyTerryLoss(BradleyTerryConfig(center_coef=0.1))(ScoreTerms(scores), pairs)
    assert reduced(got, pairs).item() == pytest.approx(want / PAIRS, rel=1e-5)
    own = [scores[row, pairs.lengths[row] - 1].item() for row in range(2 * PAIRS)]
    right = [float(own[2 * p] > own[2 * p + 1]) for p in range(PAIRS) for _ in range(2)]
    assert got.metrics_B["accuracy"].tolist() == right
    for name, place in (("score_chosen", 0), ("score_rejected", 1)):
        told = [own[2 * p + place] for p in range(PAIRS) for _ in range(2)]
        assert got.metrics_B[name].tolist() == pytest.approx(told)
    even = replace(pairs, margins=torch.zeros(2 * PAIRS))
    zero = BradleyTerryLoss(BradleyTerryConfig())(ScoreTerms(torch.zeros_like(scores)), even)
    assert reduced(zero, even).item() == pytest.approx(math.log(2), abs=1e-6)
    assert (zero.metrics_B["accuracy"] == 0.5).all()


@pytest.mark.parametrize("config", [config for config, _ in CASES], ids=lambda c: c.kind)
def test_any_order_and_split_of_the_pairs_gives_the_same_gradient(config: PairLoss) -> None:
    pairs, logprobs = batch(seed=5)
    weights = token_weights(pairs.loss_mask, Aggregation.SEQUENCE_MEAN)
    pairs = replace(pairs, token_weights=weights)

    def gradient(parts: list[list[int]]) -> torch.Tensor:
        leaf = logprobs.clone().requires_grad_()
        for part in parts:
            rows = [2 * pair + i for pair in part for i in (0, 1)]
            some = pairs.select(rows)
            loss = PairedLoss(config)(PolicyTerms(leaf[rows]), some)
            (loss.loss_BT * some.require("token_weights", made_by="here")).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    order = list(range(PAIRS))
    random.Random(1).shuffle(order)
    torch.testing.assert_close(gradient([[p] for p in order]), gradient([list(range(PAIRS))]))


def test_texts_lose_the_log_likelihood_of_trained_tokens_only() -> None:
    pairs, logprobs = batch()
    got = TextLoss()(PolicyTerms(logprobs), pairs)
    torch.testing.assert_close(got.loss_BT, -logprobs * pairs.loss_mask)
