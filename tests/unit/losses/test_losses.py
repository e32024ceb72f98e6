"""Loss terms against numbers worked by hand, finite differences and their invariances."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from roll.algorithms import EntropyBonus, KlToReference, PpoClip, SumLoss, build_loss, token_weights
from roll.algorithms.loss_interface import PolicyTerms, TokenLoss, reads_entropy
from roll.algorithms.update_metrics import advantage_metrics
from roll.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    EntropyConfig,
    KlConfig,
    PpoClipConfig,
)
from roll.core.batches import RolloutBatch
from roll.core.metrics import Metrics
from roll.core.types import RankInfo
from roll.strategy.training.reduce import LossMetrics, update_metrics
from tests.tiny import rollout_batch


def one_token(*, ratio: float, advantage: float) -> tuple[PolicyTerms, RolloutBatch]:
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    batch = RolloutBatch(
        tokens=torch.zeros(1, 1, dtype=torch.int64),
        lengths=torch.tensor([1]),
        sample_ids=["0/a/0"],
        tags=["x"],
        group_ids=torch.tensor([0]),
        loss_mask=torch.ones(1, 1, dtype=torch.bool),
        old_logprobs=old,
        advantages=torch.tensor([[advantage]], dtype=torch.float64),
    )
    return PolicyTerms((old + math.log(ratio)).requires_grad_()), batch


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "has_gradient"),
    [
        (1.0, 2.0, -2.0, 0, True),
        (1.1, 2.0, -2.2, 0, True),
        (1.5, 2.0, -2.56, 1, False),  # clipped above at 1.28
        (0.5, 2.0, -1.0, 0, True),  # below, but raising the ratio still helps
        (0.5, -2.0, 1.6, 1, False),  # clipped below at 0.8
        (1.5, -2.0, 3.0, 0, True),
        (5.0, -2.0, 6.0, 0, False),  # dual clip at 3 times
    ],
)
def test_ppo_clip_gives_the_hand_worked_loss(
    ratio: float, advantage: float, loss: float, clipped: int, has_gradient: bool
) -> None:
    terms, batch = one_token(ratio=ratio, advantage=advantage)
    result = PpoClip(PpoClipConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0))(terms, batch)
    result.loss_BT.sum().backward()
    assert terms.logprobs_BT.grad is not None
    assert result.loss_BT.item() == pytest.approx(loss)
    assert result.metrics_BT["clip_fraction"].item() == clipped
    assert result.metrics_BT["ratio/mean"].item() == pytest.approx(ratio)
    expected = -ratio * advantage if has_gradient else 0
    assert terms.logprobs_BT.grad.item() == pytest.approx(expected)


def test_dual_clip_is_off_unless_it_is_set_and_counts_its_tokens() -> None:
    terms, batch = one_token(ratio=5, advantage=-2)
    plain = PpoClip(PpoClipConfig())(terms, batch)
    assert plain.loss_BT.item() == pytest.approx(10)
    assert "dual_clip_fraction" not in plain.metrics_BT
    bounded = PpoClip(PpoClipConfig(dual_clip=3))(terms, batch)
    assert bounded.metrics_BT["dual_clip_fraction"].item() == 1


def test_an_enormous_ratio_stays_finite() -> None:
    terms, batch = one_token(ratio=1, advantage=-1)
    far = PolicyTerms((terms.logprobs_BT.detach() + 500).float())
    result = PpoClip(PpoClipConfig())(far, batch)
    assert result.loss_BT.item() == pytest.approx(math.exp(20), rel=1e-6)


def full_batch(seed: int = 0) -> tuple[PolicyTerms, RolloutBatch]:
    batch = rollout_batch(seed=seed)
    g = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(batch.tokens.shape, generator=g, dtype=torch.float64)

    old_BT = -draw().abs() - 0.1
    batch = replace(
        batch,
        old_logprobs=old_BT,
        ref_logprobs=old_BT + 0.3 * draw(),
        advantages=draw() * batch.loss_mask,
        token_weights=token_weights(batch.loss_mask, Aggregation.SEQUENCE_MEAN),
    )
    return PolicyTerms(old_BT + 0.3 * draw(), draw().abs()), batch


def weighted(loss: SumLoss, terms: PolicyTerms, batch: RolloutBatch) -> Tensor:
    assert batch.token_weights is not None
    return (loss(terms, batch).loss_BT * batch.token_weights).sum()


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_at_ratio_one_the_loss_is_minus_the_mean_advantage(dual_clip: float | None) -> None:
    _, batch = full_batch()
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    assert batch.token_weights is not None
    logprobs_BT = batch.old_logprobs.clone().requires_grad_()
    result = PpoClip(PpoClipConfig(dual_clip=dual_clip))(PolicyTerms(logprobs_BT), batch)
    loss = (result.loss_BT * batch.token_weights).sum()
    loss.backward()
    assert logprobs_BT.grad is not None
    assert torch.equal(loss, -(batch.advantages * batch.token_weights).sum())
    assert torch.equal(logprobs_BT.grad, -(batch.advantages * batch.token_weights))
    assert (result.metrics_BT["ratio/mean"] == 1).all()
    assert (result.metrics_BT["clip_fraction"] == 0).all()
    assert (result.metrics_BT["approx_kl"] == 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_matches_finite_differences(
    estimator: Literal["k1", "k2", "k3"],
) -> None:
    terms, batch = full_batch()
    assert terms.entropy_BT is not None
    loss = SumLoss(
        (
            PpoClip(PpoClipConfig(clip_high=0.28, dual_clip=3.0)),
            KlToReference(KlConfig(coef=0.1, estimator=estimator)),
            EntropyBonus(EntropyConfig(coef=0.01)),
        )
    )

    def total(logprobs_BT: Tensor, entropy_BT: Tensor) -> Tensor:
        return weighted(loss, PolicyTerms(logprobs_BT, entropy_BT), batch)

    inputs = (
        terms.logprobs_BT.clone().requires_grad_(),
        terms.entropy_BT.clone().requires_grad_(),
    )
    assert torch.autograd.gradcheck(total, inputs)


def test_padding_does_not_change_the_loss() -> None:
    terms, batch = full_batch()
    assert terms.entropy_BT is not None
    loss = SumLoss(
        (
            PpoClip(PpoClipConfig()),
            KlToReference(KlConfig(coef=0.1)),
            EntropyBonus(EntropyConfig(coef=0.01)),
        )
    )
    other = rollout_batch(rows=2, longest=40)
    zeros = torch.zeros(other.tokens.shape)
    other = replace(other, old_logprobs=zeros, ref_logprobs=zeros)
    other = replace(other, advantages=zeros, token_weights=zeros)
    both = RolloutBatch.concat([batch, other])

    def longer(values_BT: Tensor) -> Tensor:
        padded_BT = torch.randn(both.tokens.shape, dtype=torch.float64)
        padded_BT[: values_BT.shape[0], : values_BT.shape[1]] = values_BT
        return padded_BT

    padded = PolicyTerms(longer(terms.logprobs_BT), longer(terms.entropy_BT))
    torch.testing.assert_close(
        weighted(loss, padded, both), weighted(loss, terms, batch), rtol=1e-12, atol=1e-12
    )


def test_the_config_makes_the_terms_with_their_coefficients() -> None:
    config = AlgorithmConfig(
        loss=(
            PpoClipConfig(clip_high=0.3, dual_clip=4.0, coef=2.0),
            KlConfig(coef=0.5, estimator="k2"),
            EntropyConfig(coef=0.25),
        )
    )
    terms, batch = full_batch()
    assert terms.entropy_BT is not None
    loss = build_loss(config)
    result = loss(terms, batch)
    expected = {
        "policy": 2 * PpoClip(PpoClipConfig(clip_high=0.3, dual_clip=4.0))(terms, batch).loss_BT,
        "kl": 0.5 * KlToReference(KlConfig(estimator="k2"))(terms, batch).loss_BT,
        "entropy": -0.25 * terms.entropy_BT,
    }
    assert result.parts_BT.keys() == expected.keys()
    for name, share_BT in expected.items():
        found_BT = result.parts_BT[name]
        torch.testing.assert_close(found_BT[batch.loss_mask], share_BT[batch.loss_mask])
    torch.testing.assert_close(result.loss_BT, sum(result.parts_BT.values()))
    assert pickle.loads(pickle.dumps(loss)) == loss


@pytest.mark.parametrize(
    ("progress", "kl", "entropy"), [(0.0, 0.5, 0.2), (0.25, 0.5, 0.15), (1.0, 0.5, 0.0)]
)
def test_a_factor_changes_evenly_from_the_first_step_to_the_last(
    progress: float, kl: float, entropy: float
) -> None:
    terms = (PpoClipConfig(), KlConfig(coef=0.5), EntropyConfig(coef=0.2, end_coef=0.0))
    loss, (given, batch) = build_loss(AlgorithmConfig(loss=terms)).at(progress), full_batch()
    plain = (PpoClipConfig(), KlConfig(coef=kl), EntropyConfig(coef=entropy))
    expected = build_loss(AlgorithmConfig(loss=plain))(given, batch)
    torch.testing.assert_close(loss(given, batch).loss_BT, expected.loss_BT)
    assert loss.changing_coefs() == {"coef/entropy": pytest.approx(entropy)}


def test_metrics_have_the_names_of_the_run_and_carry_no_gradient() -> None:
    terms, batch = full_batch()
    attached = PolicyTerms(terms.logprobs_BT.requires_grad_(), terms.entropy_BT)
    result = build_loss(AlgorithmConfig())(attached, batch)
    assert set(result.metrics_BT) == {
        "ratio/mean",
        "clip_fraction",
        "approx_kl",
        "kl/ref",
        "entropy",
    }
    reported = [*result.metrics_BT.values(), *result.parts_BT.values()]
    assert not any(value_BT.requires_grad for value_BT in reported)
    assert result.loss_BT.requires_grad


def test_what_was_not_computed_is_not_reported() -> None:
    terms, batch = full_batch()
    result = build_loss(AlgorithmConfig())(
        PolicyTerms(terms.logprobs_BT), replace(batch, ref_logprobs=None)
    )
    assert "entropy" not in result.metrics_BT
    assert "kl/ref" not in result.metrics_BT


def test_entropies_are_read_for_the_report_and_for_terms_that_use_them() -> None:
    def reads(*loss: dict[str, Any], **settings: Any) -> bool:
        config = AlgorithmConfig.model_validate({"loss": loss, **settings})
        return reads_entropy(build_loss(config))

    policy, unread = {"kind": "ppo_clip"}, {"report_entropy": False}
    assert reads(policy)
    assert not reads(policy, **unread)
    assert reads(policy, {"kind": "entropy", "coef": 0.01}, **unread)
    assert reads({"kind": "tests.own_parts:Clipped"}, **unread)
    assert not reads({"kind": "tests.own_parts:Nearness"}, **unread)
    assert not reads_entropy(object())


def test_missing_inputs_name_what_makes_them() -> None:
    terms, batch = full_batch()
    with pytest.raises(ValueError, match="run add_logprobs"):
        KlToReference(KlConfig())(terms, replace(batch, ref_logprobs=None))
    with pytest.raises(ValueError, match="run add_advantages"):
        PpoClip(PpoClipConfig())(terms, replace(batch, advantages=None))
    with pytest.raises(ValueError, match="got no entropy"):
        EntropyBonus(EntropyConfig(coef=0.01))(PolicyTerms(terms.logprobs_BT), batch)


def test_without_old_logprobs_the_ratio_is_one_and_the_mismatch_is_seen_in_training() -> None:
    terms, batch = full_batch()
    attached = PolicyTerms(terms.logprobs_BT.requires_grad_(), terms.entropy_BT)
    fresh = replace(batch, old_logprobs=None)
    result = build_loss(AlgorithmConfig())(attached, fresh)
    assert (result.metrics_BT["ratio/mean"] == 1).all()
    torch.testing.assert_close(result.loss_BT, -fresh.require("advantages", made_by="test"))
    gap_BT = (terms.logprobs_BT - fresh.require("rollout_logprobs", made_by="test")).abs()
    torch.testing.assert_close(result.maxima_BT["mismatch/logprob_abs_max"], gap_BT.detach())


def test_two_terms_of_one_part_are_refused() -> None:
    with pytest.raises(ValueError, match="each part once"):
        SumLoss((PpoClip(PpoClipConfig()), PpoClip(PpoClipConfig(clip_high=0.3))))


def test_a_maximum_over_no_trained_token_is_left_out() -> None:
    terms, batch = full_batch()
    fresh = replace(batch, old_logprobs=None)
    collected = LossMetrics(rows_local=len(batch), dp_size=1)
    weights_BT = torch.zeros_like(terms.logprobs_BT)
    for mask_BT in (torch.zeros_like(fresh.loss_mask), fresh.loss_mask):
        masked = replace(fresh, loss_mask=mask_BT)
        loss = build_loss(AlgorithmConfig())(terms, masked)
        collected.add(loss, weights_BT, mask_BT, torch.tensor(0.0))
        found = collected.take().values_by_name()
        assert ("mismatch/logprob_abs_max" in found) == bool(mask_BT.any())
        assert all(math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("mode", Aggregation)
def test_metrics_of_ranks_and_micro_batches_are_those_of_the_whole_update(
    mode: Aggregation,
) -> None:
    """Two ranks of three rows, each in two micro-batches; row 4 is not trained."""
    _, batch = full_batch()
    batch = batch.select(range(6)).keep(torch.arange(6) != 4)
    mask_BT = batch.loss_mask
    weights_BT = token_weights(mask_BT, mode, max_tokens=9).double()
    g = torch.Generator().manual_seed(0)
    part_BT, other_BT, seen_BT = torch.randn(3, *mask_BT.shape, generator=g, dtype=torch.float64)
    seen_B = torch.randn(6, generator=g, dtype=torch.float64)
    batch = replace(batch, token_weights=weights_BT)
    found = []
    for micros in ([0, 1], [2]), ([4], [3, 5]):
        rank = LossMetrics(rows_local=3, dp_size=2)
        for rows in micros:
            loss = TokenLoss(
                loss_BT=(part_BT + other_BT)[rows],
                parts_BT={"policy": part_BT[rows], "kl": other_BT[rows]},
                metrics_BT={"clip_fraction": seen_BT[rows]},
                maxima_BT={"largest": seen_BT[rows]},
                metrics_B={"accuracy": seen_B[rows]},
            )
            total = (loss.loss_BT * weights_BT[rows]).sum()
            rank.add(loss, weights_BT[rows], mask_BT[rows], total)
        own = batch.select([row for rows in micros for row in rows])
        found.append(rank.take() | advantage_metrics(own, ranks=2))
    advantages_BT = batch.require("advantages", made_by="full_batch")
    trained = [0, 1, 2, 3, 5]
    assert Metrics.concat(found).values_by_name() == pytest.approx(
        {
            "loss/total": ((part_BT + other_BT) * weights_BT).sum().item(),
            "loss/policy": (part_BT * weights_BT).sum().item(),
            "loss/kl": (other_BT * weights_BT).sum().item(),
            "clip_fraction": seen_BT[mask_BT].mean().item(),
            "largest": seen_BT[mask_BT].max().item(),
            "accuracy": seen_B[trained].mean().item(),
            "trained_tokens": mask_BT.sum().item(),
            "advantage/mean": (advantages_BT * weights_BT).sum().item(),
            "advantage/abs_mean": advantages_BT[mask_BT].abs().mean().item(),
            "token_weights/sum": weights_BT.sum().item(),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("applied", [True, False])
def test_ranks_count_a_skipped_step_once(applied: bool) -> None:
    ranks = [RankInfo(rank, rank, 3, is_dp_leader=True) for rank in range(3)]
    found = Metrics.concat(
        [Metrics(update_metrics(2.5, 1e-6, applied=applied, info=info)) for info in ranks]
    )
    expected = {"grad_norm": 2.5, "lr": 1e-6, "skipped_steps": 0.0 if applied else 1.0}
    assert found.values_by_name() == expected
