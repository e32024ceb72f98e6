"""Importance weights and rejection against loops, and numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms import PpoClip, SumLoss, correct, token_weights, use_engine_logprobs
from roll.algorithms.loss_interface import PolicyTerms
from roll.config.algorithm import (
    Aggregation,
    CorrectionConfig,
    PpoClipConfig,
    RejectConfig,
    WeightConfig,
)
from roll.config.algorithm.correction import RatioLevel
from roll.core.batches import RolloutBatch
from roll.strategy.training.reduce import weighted_sum
from tests.tiny import rollout_batch

LEVELS: list[RatioLevel] = ["token", "turn", "sequence", "geometric"]


def batch_of(mask: list[list[int]], gaps: list[list[float]]) -> RolloutBatch:
    """Rows with the given log p_trainer - log p_engine; the engine's log-probs are -1."""
    mask_BT = torch.tensor(mask).bool()
    gap_BT = torch.tensor(gaps, dtype=torch.float64)
    rows, length = mask_BT.shape
    engine_BT = torch.where(mask_BT, -1.0, 0.0).double()
    return RolloutBatch(
        tokens=torch.zeros(rows, length, dtype=torch.int64),
        lengths=torch.full((rows,), length),
        sample_ids=[f"0/a/{i}" for i in range(rows)],
        tags=["x"] * rows,
        group_ids=torch.zeros(rows, dtype=torch.int64),
        loss_mask=mask_BT,
        rollout_logprobs=engine_BT,
        old_logprobs=engine_BT + gap_BT,
    )


MASK = [[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]
GAPS = [[9.0, 0.2, 0.3, 9.0, -0.4, 9.0], [0.1, 9.0, 9.0, -0.2, 0.5, -1.0], [9.0] * 6]


@pytest.mark.parametrize(
    ("level", "logs"),
    [
        ("token", [[0.2, 0.3, -0.4], [0.1, -0.2, 0.5, -1.0]]),
        ("turn", [[0.5, 0.5, -0.4], [0.1, -0.7, -0.7, -0.7]]),
        ("sequence", [[0.1] * 3, [-0.6] * 4]),
        ("geometric", [[0.1 / 3] * 3, [-0.15] * 4]),
    ],
)
def test_each_level_gives_the_hand_worked_weights(
    level: RatioLevel, logs: list[list[float]]
) -> None:
    config = CorrectionConfig(weight=WeightConfig(level=level, upper=9))
    batch, _ = correct(batch_of(MASK, GAPS), config)
    weights_BT = batch.require("importance_weights", made_by="test")
    assert weights_BT.dtype == torch.float32
    for row_T, mask_T, expected in zip(weights_BT, batch.loss_mask, [*logs, []], strict=True):
        assert row_T[mask_T].tolist() == pytest.approx([math.exp(x) for x in expected])
    assert (weights_BT[~batch.loss_mask] == 0).all()
    assert torch.equal(batch.loss_mask, torch.tensor(MASK).bool())


def ratios_by_loops(gaps: list[float], mask: list[bool], level: RatioLevel) -> list[float]:
    """One per token; nan outside the mask."""
    found: list[float] = []
    trained = [gap for gap, on in zip(gaps, mask, strict=True) if on]
    for on, run in groupby(zip(gaps, mask, strict=True), key=lambda pair: pair[1]):
        turn = [gap for gap, _ in run]
        for gap in turn:
            logs = {
                "token": gap,
                "turn": sum(turn),
                "sequence": sum(trained),
                "geometric": sum(trained) / max(len(trained), 1),
            }
            found.append(math.exp(max(min(logs[level], 20), -20)) if on else math.nan)
    return found


def random_batch(seed: int, rows: int = 6, length: int = 9) -> RolloutBatch:
    g = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(rows, length, generator=g) < torch.rand(rows, 1, generator=g)
    gap_BT = torch.randn(rows, length, generator=g, dtype=torch.float64)
    return batch_of(mask_BT.int().tolist(), gap_BT.tolist())


@pytest.mark.parametrize("level", LEVELS)
@given(seed=st.integers(0, 100_000), upper=st.floats(1.0, 3.0), lower=st.floats(0.1, 0.9))
@settings(max_examples=30)
def test_weights_and_rejection_match_the_loops(
    level: RatioLevel, seed: int, upper: float, lower: float
) -> None:
    before = random_batch(seed)
    gap_BT = before.require("old_logprobs", made_by="test") - before.require(
        "rollout_logprobs", made_by="test"
    )
    truncated, _ = correct(
        before, CorrectionConfig(weight=WeightConfig(level=level, upper=upper, lower=lower))
    )
    masked, _ = correct(
        before,
        CorrectionConfig(weight=WeightConfig(level=level, upper=upper, lower=lower, mode="mask")),
    )
    rejected, _ = correct(
        before, CorrectionConfig(reject=(RejectConfig(level=level, upper=upper, lower=lower),))
    )
    assert rejected.importance_weights is None
    assert torch.equal(masked.loss_mask, before.loss_mask)
    for i, mask_T in enumerate(before.loss_mask):
        ratios = ratios_by_loops(gap_BT[i].tolist(), mask_T.tolist(), level)
        for t, ratio in enumerate(ratios):
            on = bool(mask_T[t])
            inside = lower <= ratio <= upper
            clipped = min(max(ratio, lower), upper)
            assert weight(truncated)[i, t].item() == pytest.approx(clipped if on else 0)
            assert weight(masked)[i, t].item() == pytest.approx(ratio if on and inside else 0)
            assert bool(rejected.loss_mask[i, t]) == (on and inside)


def weight(batch: RolloutBatch) -> Tensor:
    return batch.require("importance_weights", made_by="test")


def test_rules_are_all_taken_before_any_rejection() -> None:
    rules = (RejectConfig(level="token", upper=1.3), RejectConfig(level="sequence", lower=0.6))
    kept = [
        correct(batch_of(MASK, GAPS), CorrectionConfig(reject=order))[0].loss_mask.tolist()
        for order in (rules, rules[::-1])
    ]
    # exp(0.3) = 1.35 leaves the first row; exp(-0.6) = 0.55 takes out the second one.
    expected = torch.tensor([[0, 1, 0, 0, 1, 0], [0] * 6, [0] * 6]).bool().tolist()
    assert kept == [expected, expected]


def test_rejected_tokens_have_no_weight_and_means_stay_means() -> None:
    config = CorrectionConfig(
        weight=WeightConfig(upper=9), reject=(RejectConfig(level="token", upper=1.3),)
    )
    batch, _ = correct(batch_of(MASK, GAPS), config)
    assert (weight(batch)[~batch.loss_mask] == 0).all()
    assert batch.loss_mask.sum() == 5
    weights_BT = token_weights(batch.loss_mask, Aggregation.TOKEN_MEAN)
    assert weights_BT.sum().item() == pytest.approx(1)


def test_a_correction_of_equal_log_probs_changes_nothing() -> None:
    batch = rollout_batch()
    batch = replace(batch, old_logprobs=batch.rollout_logprobs)
    config = CorrectionConfig(
        weight=WeightConfig(lower=0.5, mode="mask"),
        reject=tuple(RejectConfig(level=level, lower=0.99, upper=1.01) for level in LEVELS),
    )
    found, metrics = correct(batch, config)
    assert torch.equal(found.loss_mask, batch.loss_mask)
    assert torch.equal(weight(found), batch.loss_mask.float())
    values = metrics.values_by_name()
    ones = {"ratio_max", "effective_sample_size", "weight", "weight_effective_sample_size"}
    for name, value in values.items():
        if name.startswith("correction/log_perplexity_") and "gap" not in name:
            continue
        assert value == (1 if name.removeprefix("correction/") in ones else 0), name


def test_the_metrics_of_three_tokens_are_the_hand_worked_ones() -> None:
    batch = batch_of([[1, 1, 0], [0, 1, 0]], [[0.5, -1.0, 7.0], [7.0, 0.2, 7.0]])
    config = CorrectionConfig(
        weight=WeightConfig(upper=1.5), reject=(RejectConfig(level="sequence", lower=0.7),)
    )
    values = correct(batch, config)[1].values_by_name()
    gaps = [0.5, -1.0, 0.2]
    ratios = [math.exp(gap) for gap in gaps]
    weights = [1.5, math.exp(-1), math.exp(0.2)]

    def mean(numbers: list[float]) -> float:
        return sum(numbers) / len(numbers)

    def size(numbers: list[float]) -> float:
        return sum(numbers) ** 2 / 3 / sum(x * x for x in numbers)

    expected = {
        "kl_engine_trainer": mean([r - 1 - x for r, x in zip(ratios, gaps, strict=True)]),
        "kl_engine_trainer_k1": -mean(gaps),
        "kl_trainer_engine": mean([r * (1 / r - 1 + x) for r, x in zip(ratios, gaps, strict=True)]),
        "kl_trainer_engine_k1": mean([r * x for r, x in zip(ratios, gaps, strict=True)]),
        "rejected_tokens": 2 / 3,
        "rejected_sequences": 1 / 2,
        "log_perplexity_engine": 1.0,
        "log_perplexity_trainer": mean([1.25, 0.8]),
        "log_perplexity_gap": mean([0.25, -0.2]),
        "log_perplexity_gap_abs": mean([0.25, 0.2]),
        "ratio_max": math.exp(0.5),
        "effective_sample_size": size(ratios),
        "weight": mean(weights),
        "weight_effective_sample_size": size(weights),
        "bounded_weights": 1 / 3,
    }
    assert values == pytest.approx({f"correction/{name}": x for name, x in expected.items()})


def test_the_divergences_are_those_of_real_distributions() -> None:
    """Over all tokens of a vocabulary, drawn by the engine with its own probabilities."""
    engine = [0.5, 0.25, 0.125, 0.125]
    trainer = [0.25, 0.25, 0.375, 0.125]
    counts = [int(p * 8) for p in engine]
    tokens = [v for v, count in enumerate(counts) for _ in range(count)]
    gaps = [[math.log(trainer[v] / engine[v]) for v in tokens]]
    config = CorrectionConfig(weight=WeightConfig())
    values = correct(batch_of([[1] * 8], gaps), config)[1].values_by_name()
    pairs = list(zip(engine, trainer, strict=True))
    forward = sum(e * math.log(e / t) for e, t in pairs)
    backward = sum(t * math.log(t / e) for e, t in pairs)
    for suffix in ("", "_k1"):
        assert values[f"correction/kl_engine_trainer{suffix}"] == pytest.approx(forward)
        assert values[f"correction/kl_trainer_engine{suffix}"] == pytest.approx(backward)


@pytest.mark.parametrize("level", LEVELS)
def test_enormous_gaps_and_garbage_outside_the_mask_stay_finite(level: RatioLevel) -> None:
    batch = batch_of([[1, 1, 0, 1], [1, 1, 0, 0]], [[900.0] * 4, [-900.0] * 4])
    old_BT = batch.require("old_logprobs", made_by="test")
    batch = replace(batch, old_logprobs=old_BT.masked_fill(~batch.loss_mask, torch.nan))
    batch = replace(batch, rollout_logprobs=torch.where(batch.loss_mask, -1.0, torch.inf).double())
    config = CorrectionConfig(weight=WeightConfig(level=level, upper=1e12))
    found, metrics = correct(batch, config)
    assert weight(found).isfinite().all()
    assert weight(found).max().item() == pytest.approx(math.exp(20))
    assert all(math.isfinite(value) for value in metrics.values_by_name().values())


@pytest.mark.parametrize("level", LEVELS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10)
def test_row_order_padding_and_empty_rows_change_nothing(level: RatioLevel, seed: int) -> None:
    batch = random_batch(seed)
    config = CorrectionConfig(
        weight=WeightConfig(level=level), reject=(RejectConfig(level=level, lower=0.4),)
    )
    expected, metrics = correct(batch, config)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    empty = batch_of([[0] * 14], [[3.0] * 14])
    found, others = correct(RolloutBatch.concat([batch.select(order), empty]), config)
    assert torch.equal(found.loss_mask[:6, :9], expected.loss_mask[order])
    torch.testing.assert_close(weight(found)[:6, :9], weight(expected)[order])
    assert not found.loss_mask[6:].any()
    assert others.values_by_name() == pytest.approx(metrics.values_by_name())


def test_a_step_without_trained_tokens_reports_nothing() -> None:
    found, metrics = correct(
        batch_of([[0, 0]], [[1.0, 1.0]]), CorrectionConfig(weight=WeightConfig())
    )
    assert len(metrics) == 0
    assert (weight(found) == 0).all()


def test_missing_log_probs_name_what_makes_them() -> None:
    config = CorrectionConfig(weight=WeightConfig())
    with pytest.raises(ValueError, match="run add_logprobs first"):
        correct(rollout_batch(), config)
    batch = replace(rollout_batch(), rollout_logprobs=None)
    with pytest.raises(ValueError, match="engine that returns log-probs"):
        use_engine_logprobs(batch)


def test_the_engines_log_probs_as_the_old_ones_put_the_gap_into_the_ratio() -> None:
    batch = batch_of(MASK, GAPS)
    trainer_BT = batch.require("old_logprobs", made_by="test")
    batch = replace(batch, advantages=torch.ones_like(trainer_BT))
    result = PpoClip(PpoClipConfig(clip_high=9))(
        PolicyTerms(trainer_BT), use_engine_logprobs(batch)
    )
    ratio_BT = result.metrics_BT["ratio/mean"]
    expected_BT = torch.tensor(GAPS, dtype=torch.float64).exp()
    torch.testing.assert_close(ratio_BT[batch.loss_mask], expected_BT[batch.loss_mask])


def test_weights_of_the_exact_ratio_make_the_gradient_that_of_the_trainers_policy() -> None:
    """Eight tokens that the engine drew in its own proportions, weighted, are an expectation over
    the trainer's distribution: the plain policy gradient of the advantage of each token."""
    engine, trainer = [0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.375, 0.125]
    advantage = [1.0, -2.0, 0.5, 3.0]
    tokens = [v for v, p in enumerate(engine) for _ in range(int(p * 8))]
    gaps = [[math.log(trainer[v] / engine[v]) for v in tokens]]
    batch, _ = correct(batch_of([[1] * 8], gaps), CorrectionConfig(weight=WeightConfig(upper=99)))
    batch = replace(batch, advantages=torch.tensor([[advantage[v] for v in tokens]]).double())
    old_BT = batch.require("old_logprobs", made_by="test")
    loss = SumLoss((PpoClip(PpoClipConfig()),))(PolicyTerms(old_BT), batch)
    weights_BT = token_weights(batch.loss_mask, Aggregation.TOKEN_MEAN)
    expected = -sum(p * a for p, a in zip(trainer, advantage, strict=True))
    assert weighted_sum(loss.loss_BT, weights_BT).item() == pytest.approx(expected)
