"""Normalised rewards: all sixteen pairs of levels against loops, and running moments over steps."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms import NormalizeReward, build_shaping
from roll.algorithms.advantages.group import group_advantages
from roll.algorithms.moments import PART, Moments, standardized
from roll.algorithms.shaping.normalize import normalized
from roll.algorithms.shaping.rewards import Rewards
from roll.config.algorithm import AlgorithmConfig, NormalizeRewardConfig
from roll.config.algorithm.shaping import Level
from roll.core.batches import RolloutBatch
from roll.core.errors import CheckpointError
from tests.tiny import rollout_batch

LEVELS: tuple[Level, ...] = ("none", "group", "batch", "running")
PAIRS = list(itertools.product(LEVELS, LEVELS))
EPS = 1e-6

step_of_rewards = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 1.0, -2.5, 7.0]), st.integers(-1, 2)),
    min_size=1,
    max_size=9,
)


def batch_of(rewards: list[float], groups: list[int]) -> RolloutBatch:
    return replace(
        rollout_batch(len(rewards)),
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor(groups),
    )


def by_loops(steps: list[list[tuple[float, int]]], mean: Level, std: Level) -> list[list[float]]:
    """Every step normalised, with all earlier rewards kept in a list."""
    seen: list[float] = []
    found = []
    for rows in steps:
        rows = [(torch.tensor(r).item(), g) for r, g in rows]  # as float32 holds it
        everything = [r for r, _ in rows]
        seen += everything
        shaped = []
        for reward, group in rows:
            level = {
                "group": [r for r, g in rows if g == group],
                "batch": everything,
                "running": seen,
            }
            center = 0.0 if mean == "none" else statistics.fmean(level[mean])
            spread = 0.0
            if std != "none" and len(set(level[std])) > 1:
                spread = statistics.stdev(level[std])
            shaped.append((reward - center) / (spread + EPS if spread else 1.0))
        found.append(shaped)
    return found


@pytest.mark.parametrize("scale", [1.0, -1e9])
def test_rewards_that_differ_by_rounding_alone_are_not_divided(scale: float) -> None:
    """They would become as large as those of any other group."""
    values_B = torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64) * scale
    mean_B, std_B = values_B.mean().expand(2), values_B.std().expand(2)
    assert values_B[0] != values_B[1]
    assert normalized(values_B, mean_B, std_B, mean_B, eps=1e-20).abs().max() < 1e-6


@pytest.mark.parametrize(("mean", "std"), PAIRS)
@given(steps=st.lists(step_of_rewards, min_size=1, max_size=4))
@settings(max_examples=25)
def test_every_pair_of_levels_matches_the_loops_over_several_steps(
    mean: Level, std: Level, steps: list[list[tuple[float, int]]]
) -> None:
    normalize = NormalizeReward(NormalizeRewardConfig(mean=mean, std=std, eps=EPS))
    for rows, expected in zip(steps, by_loops(steps, mean, std), strict=True):
        batch = batch_of([r for r, _ in rows], [g for _, g in rows])
        assert batch.rewards is not None
        shaped, _ = normalize(Rewards(batch.rewards.double()), batch)
        assert shaped.total_B.shape == batch.rewards.shape
        assert shaped.total_B.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("mean", "std"), PAIRS)
def test_every_pair_of_levels_runs_from_the_config(mean: Level, std: Level) -> None:
    config = AlgorithmConfig(reward_shaping=(NormalizeRewardConfig(mean=mean, std=std),))
    batch = rollout_batch()
    shaped, metrics = build_shaping(config, max_new_tokens=64).rewards(batch)
    assert shaped.rewards is not None
    assert batch.rewards is not None
    assert shaped.rewards.dtype == torch.float32
    rows = list(zip(batch.rewards.tolist(), batch.group_ids.tolist(), strict=True))
    ((expected),) = by_loops([rows], mean, std)
    assert shaped.rewards.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    values = metrics.values_by_name()
    assert ("shaping/reward/normalize/running_mean" in values) == ("running" in (mean, std))
    assert values["shaping/reward/mean"] == pytest.approx(statistics.fmean(expected), abs=1e-6)


@pytest.mark.parametrize("std", LEVELS)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [0.1], [0.0, 0.0]])
def test_rewards_without_spread_are_not_divided(std: Level, rewards: list[float]) -> None:
    batch = batch_of(rewards, [3] * len(rewards))
    assert batch.rewards is not None
    for _ in range(3):  # merged moments of equal rewards must not round to a spread
        shaped, _ = NormalizeReward(NormalizeRewardConfig(mean="none", std=std))(
            Rewards(batch.rewards.double()), batch
        )
        assert torch.equal(shaped.total_B, batch.rewards.double())


def test_group_levels_are_the_advantage_of_grpo() -> None:
    batch = rollout_batch(12)
    assert batch.rewards is not None
    shaped, _ = NormalizeReward(NormalizeRewardConfig(mean="group", std="group"))(
        Rewards(batch.rewards.double()), batch
    )
    expected_B = group_advantages(batch.rewards, batch.group_ids, std="group", eps=EPS)
    torch.testing.assert_close(shaped.total_B, expected_B, rtol=1e-12, atol=0)


def test_hand_worked_numbers_of_a_group_mean_over_the_spread_of_the_batch() -> None:
    batch = batch_of([1.0, 0.0, 3.0, 0.0], [0, 0, 1, 1])  # std of all: sqrt(2)
    assert batch.rewards is not None
    shaped, _ = NormalizeReward(NormalizeRewardConfig(mean="group", std="batch"))(
        Rewards(batch.rewards.double()), batch
    )
    root = math.sqrt(2)
    expected = [0.5 / root, -0.5 / root, 1.5 / root, -1.5 / root]
    assert shaped.total_B.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("mean", "std"), PAIRS)
def test_the_order_of_rows_does_not_matter(mean: Level, std: Level) -> None:
    batch = rollout_batch(10)
    order = torch.randperm(10)

    def shape(of: RolloutBatch) -> torch.Tensor:
        assert of.rewards is not None
        shaped, _ = NormalizeReward(NormalizeRewardConfig(mean=mean, std=std))(
            Rewards(of.rewards.double()), of
        )
        return shaped.total_B

    torch.testing.assert_close(shape(batch.select(order)), shape(batch)[order])


def test_the_greedy_baseline_is_moved_like_its_samples_and_moves_no_moment() -> None:
    batch = batch_of([1.0, 0.0, 3.0, 0.0], [0, 0, 1, 1])
    assert batch.rewards is not None
    normalize = NormalizeReward(NormalizeRewardConfig(mean="group", std="running"))
    baseline_B = torch.tensor([1.0, 1.0, 100.0, 100.0]).double()
    shaped, _ = normalize(Rewards(batch.rewards.double(), baseline_B), batch)
    assert shaped.baseline_B is not None
    assert normalize.moments.count == 4
    gap_B = shaped.total_B - shaped.baseline_B
    expected_B = (batch.rewards - baseline_B) / (normalize.moments.std + EPS)
    torch.testing.assert_close(gap_B, expected_B)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=8), max_size=8))
@settings(max_examples=60)
def test_merged_moments_are_those_of_all_numbers(parts: list[list[float]]) -> None:
    merged = Moments()
    for part in parts:
        merged = merged.merge(Moments.of(torch.tensor(part, dtype=torch.float64)))
    numbers = [x for part in parts for x in part]
    assert merged.count == len(numbers)
    if numbers:
        assert merged.mean == pytest.approx(statistics.fmean(numbers), abs=1e-9)
    if len(numbers) > 1:
        assert merged.std == pytest.approx(statistics.stdev(numbers), rel=1e-6, abs=1e-6)


def test_a_small_spread_on_a_large_offset_is_kept() -> None:
    g = torch.Generator().manual_seed(0)
    numbers = 1e8 + torch.randn(1000, generator=g, dtype=torch.float64)
    merged = Moments()
    for part in numbers.split(7):
        merged = merged.merge(Moments.of(part))
    assert merged.std == pytest.approx(numbers.std().item(), rel=1e-6)


@pytest.mark.parametrize("masked", [True, False])
def test_more_numbers_than_fit_a_part_are_standardized_by_all_of_them(masked: bool) -> None:
    g = torch.Generator().manual_seed(0)
    values = 5 + 2 * torch.randn(3, PART // 2, generator=g)
    mask = torch.rand(values.shape, generator=g) < 0.6 if masked else None
    chosen = torch.ones_like(values).bool() if mask is None else mask
    numbers = values[chosen].double()
    found = standardized(values.masked_fill(~chosen, torch.nan), mask, eps=EPS)
    expected = (numbers - numbers.mean()) / (numbers.std() + EPS)
    torch.testing.assert_close(found[chosen], expected.float(), rtol=1e-6, atol=1e-6)
    assert not found[~chosen].any()


def test_running_moments_go_on_exactly_from_a_checkpoint() -> None:
    config = AlgorithmConfig(reward_shaping=(NormalizeRewardConfig(mean="running", std="running"),))
    straight, first, resumed = (build_shaping(config, max_new_tokens=64) for _ in range(3))
    batches = [rollout_batch(seed=seed) for seed in range(6)]
    for batch in batches[:3]:
        straight.rewards(batch)
        first.rewards(batch)
    resumed.load(json.loads(json.dumps(first.state())))
    for batch in batches[3:]:
        one, other = straight.rewards(batch)[0].rewards, resumed.rewards(batch)[0].rewards
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert resumed.state() == straight.state()


def test_only_running_levels_are_remembered() -> None:
    config = AlgorithmConfig(reward_shaping=(NormalizeRewardConfig(mean="group", std="batch"),))
    assert build_shaping(config, max_new_tokens=64).state() == {}


def test_the_state_of_something_else_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not the state of running moments"):
        Moments.restored({"count": 3})
