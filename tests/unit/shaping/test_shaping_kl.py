"""KL in the reward: what every token pays, and the controller of its coefficient."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.algorithms import KlInReward, build_shaping
from roll.algorithms.shaping.kl_in_reward import next_coef
from roll.config.algorithm import AlgorithmConfig, KlInRewardConfig, Need
from roll.core.batches import RolloutBatch
from roll.core.errors import CheckpointError
from tests.tiny import rollout_batch

FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


def scored(seed: int = 0, rows: int = 6) -> RolloutBatch:
    """Log-probs of policy and reference; NaN and infinity outside the mask."""
    batch = rollout_batch(rows, seed=seed)
    g = torch.Generator().manual_seed(seed)
    own_BT = -torch.rand(batch.tokens.shape, generator=g)
    ref_BT = own_BT + 0.3 * torch.randn(batch.tokens.shape, generator=g)
    outside_BT = ~batch.loss_mask
    return replace(
        batch,
        old_logprobs=own_BT.masked_fill(outside_BT, torch.nan),
        ref_logprobs=ref_BT.masked_fill(outside_BT, -torch.inf),
    )


def kl_by_loops(batch: RolloutBatch, estimator: str) -> list[list[float]]:
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    return [
        [
            FORMULAS[estimator](own - ref) if trained else 0.0
            for own, ref, trained in zip(*row, strict=True)
        ]
        for row in zip(
            batch.old_logprobs.tolist(),
            batch.ref_logprobs.tolist(),
            batch.loss_mask.tolist(),
            strict=True,
        )
    ]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(seed=st.integers(0, 200))
@settings(max_examples=25)
def test_every_trained_token_pays_its_divergence(
    estimator: Literal["k1", "k2", "k3"], seed: int
) -> None:
    batch = scored(seed)
    kl = kl_by_loops(batch, estimator)
    paid_BT, metrics = KlInReward(KlInRewardConfig(coef=0.5, estimator=estimator))(batch)
    assert paid_BT.dtype == torch.float32
    torch.testing.assert_close(paid_BT, -0.5 * torch.tensor(kl), rtol=1e-5, atol=1e-7)
    counts = batch.loss_mask.sum(1).tolist()
    means = [sum(row) / count for row, count in zip(kl, counts, strict=True)]
    values = metrics.values_by_name()
    assert values["kl/in_reward"] == pytest.approx(sum(means) / len(means), rel=1e-6, abs=1e-9)
    assert values["kl/coef"] == 0.5


def test_the_penalty_comes_on_top_of_other_rewards_of_tokens() -> None:
    batch = scored()
    paid_BT, _ = KlInReward(KlInRewardConfig(coef=0.1))(batch)
    earned_BT = torch.rand(batch.tokens.shape)
    both_BT, _ = KlInReward(KlInRewardConfig(coef=0.1))(replace(batch, token_rewards=earned_BT))
    torch.testing.assert_close(both_BT, paid_BT + earned_BT)


def test_at_the_reference_nothing_is_paid() -> None:
    batch = scored()
    config = AlgorithmConfig(kl_in_reward=KlInRewardConfig(coef=0.2))
    same = replace(batch, ref_logprobs=batch.old_logprobs)
    shaped, metrics = build_shaping(config, max_new_tokens=64).rewards(same)
    assert shaped.token_rewards is not None
    assert (shaped.token_rewards == 0).all()
    assert metrics.values_by_name()["kl/in_reward"] == 0
    assert shaped.rewards is batch.rewards


def test_the_engine_s_log_probs_serve_where_the_trainer_has_none() -> None:
    batch = scored()
    from_engine = replace(batch, rollout_logprobs=batch.old_logprobs, old_logprobs=None)
    kl = KlInReward(KlInRewardConfig(coef=1.0))
    assert torch.equal(kl(from_engine)[0], kl(batch)[0])
    with pytest.raises(ValueError, match="rollout_logprobs is not set"):
        kl(replace(from_engine, rollout_logprobs=None))
    with pytest.raises(ValueError, match="run add_logprobs"):
        kl(replace(batch, ref_logprobs=None))


def test_padding_and_the_order_of_rows_change_nothing() -> None:
    batch = scored(rows=7)
    order = torch.randperm(7)
    whole_BT, metrics = KlInReward(KlInRewardConfig(coef=1.0))(batch)
    mixed_BT, mixed = KlInReward(KlInRewardConfig(coef=1.0))(batch.select(order))
    torch.testing.assert_close(mixed_BT, whole_BT[order])
    kl = metrics.values_by_name()["kl/in_reward"]
    assert mixed.values_by_name()["kl/in_reward"] == pytest.approx(kl, rel=1e-9)
    zeros_BT = torch.zeros(1, 72)
    wide = replace(rollout_batch(1, prompt=60), old_logprobs=zeros_BT, ref_logprobs=zeros_BT)
    longer = RolloutBatch.concat([batch, wide]).select(range(7))
    padded_BT, padded = KlInReward(KlInRewardConfig(coef=1.0))(longer)
    assert torch.equal(padded_BT[:, : whole_BT.shape[1]], whole_BT)
    assert padded.values_by_name()["kl/in_reward"] == pytest.approx(kl, rel=1e-9)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 1.0),  # on target
        (0.11, 1.01),  # a tenth above: error 0.1, a tenth of the horizon
        (0.05, 0.98),  # far below: error -0.2
        (9.0, 1.02),
        (-1.0, 0.98),  # an estimate may be negative
    ],
)
def test_the_controller_gives_hand_worked_coefficients(kl: float, expected: float) -> None:
    found = next_coef(1.0, kl=kl, target=0.1, samples=100, horizon=1000)
    assert found == pytest.approx(expected)


def test_an_adaptive_coefficient_changes_after_the_step_that_it_priced() -> None:
    kl = KlInReward(KlInRewardConfig(coef=0.5, estimator="k3", target=1e-4, horizon=100))
    batch = scored()
    paid_BT, metrics = kl(batch)
    assert metrics.values_by_name()["kl/coef"] == 0.5
    assert kl.current_coef == pytest.approx(0.5 * (1 + 0.2 * 6 / 100))
    again_BT, metrics = kl(batch)
    assert metrics.values_by_name()["kl/coef"] == kl.state()["coef"] / (1 + 0.2 * 6 / 100)
    torch.testing.assert_close(again_BT, paid_BT * (1 + 0.2 * 6 / 100))


def test_a_fixed_coefficient_stays_and_a_step_without_tokens_adapts_nothing() -> None:
    fixed = KlInReward(KlInRewardConfig(coef=0.5))
    adaptive = KlInReward(KlInRewardConfig(coef=0.5, target=0.1, horizon=100))
    nothing = replace(scored(), loss_mask=torch.zeros_like(scored().loss_mask))
    fixed(scored())
    paid_BT, _ = adaptive(nothing)
    assert (paid_BT == 0).all()
    assert fixed.current_coef == adaptive.current_coef == 0.5
    assert fixed.state() == {}


def test_an_adaptive_coefficient_goes_on_exactly_from_a_checkpoint() -> None:
    config = AlgorithmConfig(kl_in_reward=KlInRewardConfig(coef=0.3, target=0.05, horizon=50))
    straight, first, resumed = (build_shaping(config, max_new_tokens=64) for _ in range(3))
    for seed in range(3):
        straight.rewards(scored(seed))
        first.rewards(scored(seed))
    resumed.load(json.loads(json.dumps(first.state())))
    assert resumed.state()["kl_in_reward"]["coef"] != 0.3
    for seed in range(3, 6):
        one, other = straight.rewards(scored(seed))[0], resumed.rewards(scored(seed))[0]
        assert one.token_rewards is not None
        assert other.token_rewards is not None
        assert torch.equal(one.token_rewards, other.token_rewards)


def test_the_state_of_another_config_is_refused() -> None:
    adaptive = build_shaping(
        AlgorithmConfig(kl_in_reward=KlInRewardConfig(target=0.1)), max_new_tokens=64
    )
    fixed = build_shaping(AlgorithmConfig(kl_in_reward=KlInRewardConfig()), max_new_tokens=64)
    with pytest.raises(CheckpointError, match="remembers kl_in_reward of reward shaping, the con"):
        fixed.load(adaptive.state())
    with pytest.raises(CheckpointError, match="asks for kl_in_reward"):
        adaptive.load(fixed.state())
    with pytest.raises(CheckpointError, match="not the state of a KL coefficient"):
        adaptive.load({"kl_in_reward": {"mean": 1.0}})


def test_kl_in_the_reward_needs_a_reference() -> None:
    config = AlgorithmConfig(kl_in_reward=KlInRewardConfig())
    assert config.needs[Need.REFERENCE] == ["kl_in_reward"]
    with pytest.raises(ValidationError, match="no effect without `target`"):
        KlInRewardConfig(horizon=500)
