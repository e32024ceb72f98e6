"""Shaped rewards against numbers worked by hand and loops over the papers' formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.algorithms import (
    ClipReward,
    Grpo,
    LengthPenalty,
    OverlongPenalty,
    ScaleReward,
    build_shaping,
)
from roll.algorithms.shaping.interface import RewardShaping
from roll.algorithms.shaping.rewards import Rewards
from roll.config.algorithm import (
    AlgorithmConfig,
    ClipRewardConfig,
    GrpoConfig,
    LengthPenaltyConfig,
    Need,
    NormalizeRewardConfig,
    OverlongPenaltyConfig,
    ScaleRewardConfig,
)
from roll.core.batches import RolloutBatch
from tests.tiny import rollout_batch


def responses(
    lengths: list[int], rewards: list[float], groups: list[int] | None = None
) -> RolloutBatch:
    """Three tokens of prompt, a response of each length, and padding to twenty."""
    positions = torch.arange(20)[None]
    ends = 3 + torch.tensor(lengths)[:, None]
    return RolloutBatch(
        tokens=torch.zeros(len(lengths), 20, dtype=torch.int64),
        lengths=ends.flatten(),
        sample_ids=[f"0/p/{i}" for i in range(len(lengths))],
        tags=["x"] * len(lengths),
        group_ids=torch.tensor(groups or [0] * len(lengths)),
        loss_mask=(positions >= 3) & (positions < ends),
        rewards=torch.tensor(rewards),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


def apply(part: RewardShaping, batch: RolloutBatch) -> list[float]:
    assert batch.rewards is not None
    shaped, _ = part(Rewards(batch.rewards.double()), batch)
    return shaped.total_B.tolist()


def test_a_reward_is_clipped_to_the_bounds_that_are_set() -> None:
    batch = responses([1, 1, 1], [-3.0, 0.5, 9.0])
    assert apply(ClipReward(ClipRewardConfig(low=-1, high=2)), batch) == [-1, 0.5, 2]
    assert apply(ClipReward(ClipRewardConfig(low=-1)), batch) == [-1, 0.5, 9]
    assert apply(ClipReward(ClipRewardConfig(high=0.5)), batch) == [-3, 0.5, 0.5]


def test_a_reward_is_scaled_before_it_is_shifted() -> None:
    assert apply(
        ScaleReward(ScaleRewardConfig(factor=2, shift=-1)), responses([1, 1], [0.0, 1.0])
    ) == [-1, 1]


def overlong_by_dapo(length: int, longest: int, cache: int) -> float:
    """Equation 13 of arXiv 2503.14476, as it stands there."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@given(
    length=st.integers(0, 17),
    longest=st.integers(1, 20),
    share=st.floats(0, 1),
    penalty=st.floats(0.1, 4),
)
@settings(max_examples=60)
def test_the_overlong_penalty_is_that_of_dapo(
    length: int, longest: int, share: float, penalty: float
) -> None:
    cache = max(1, round(share * longest))
    part = OverlongPenalty(
        OverlongPenaltyConfig(max_tokens=longest, buffer_tokens=cache, penalty=penalty)
    )
    (found,) = apply(part, responses([length], [0.5]))
    assert found == pytest.approx(0.5 + penalty * overlong_by_dapo(length, longest, cache))


def test_the_overlong_penalty_of_hand_worked_lengths() -> None:
    part = OverlongPenalty(OverlongPenaltyConfig(max_tokens=10, buffer_tokens=4, penalty=2))
    batch = responses([5, 6, 7, 8, 10, 17], [0.0] * 6)
    shaped, metrics = part(Rewards(torch.zeros(6).double()), batch)
    assert shaped.total_B.tolist() == [0, 0, -0.5, -1, -2, -2]
    values = metrics.values_by_name()
    assert values["mean"] == pytest.approx(-5.5 / 6)
    assert values["penalized_fraction"] == pytest.approx(4 / 6)


def length_reward_by_kimi(lengths: list[int], passed: list[bool], groups: list[int]) -> list[float]:
    """Section 2.3.3 of arXiv 2501.12599, sample by sample."""
    found = []
    for length, ok, group in zip(lengths, passed, groups, strict=True):
        siblings = [n for n, g in zip(lengths, groups, strict=True) if g == group]
        if max(siblings) == min(siblings):
            found.append(0.0)
            continue
        x = 0.5 - (length - min(siblings)) / (max(siblings) - min(siblings))
        found.append(x if ok else min(0.0, x))
    return found


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 17), st.booleans(), st.integers(0, 2)), min_size=1, max_size=10
    )
)
@settings(max_examples=60)
def test_the_length_penalty_is_that_of_kimi(rows: list[tuple[int, bool, int]]) -> None:
    lengths = [length for length, _, _ in rows]
    passed = [ok for _, ok, _ in rows]
    groups = [group for _, _, group in rows]
    batch = responses(lengths, [float(ok) for ok in passed], groups)
    found = apply(LengthPenalty(LengthPenaltyConfig(coef=0.4)), batch)
    added = length_reward_by_kimi(lengths, passed, groups)
    expected = [float(ok) + 0.4 * x for ok, x in zip(passed, added, strict=True)]
    assert found == pytest.approx(expected)


def test_the_length_penalty_of_hand_worked_lengths_judges_the_unshaped_reward() -> None:
    batch = responses([2, 4, 6, 2], [1.0, 1.0, 0.0, 0.0])
    centred = Rewards(torch.tensor([0.5, 0.5, -0.5, -0.5]).double())
    shaped, metrics = LengthPenalty(LengthPenaltyConfig())(centred, batch)
    assert shaped.total_B.tolist() == [1.0, 0.5, -1.0, -0.5]
    assert metrics.values_by_name() == {"mean": 0}


def test_padding_and_prompt_do_not_make_a_response_long() -> None:
    short = responses([2, 4], [1.0, 1.0])
    parts: list[RewardShaping] = [
        LengthPenalty(LengthPenaltyConfig()),
        OverlongPenalty(OverlongPenaltyConfig(max_tokens=6, buffer_tokens=4)),
    ]
    wide = replace(rollout_batch(1, prompt=40), rollout_logprobs=None)
    wide = replace(wide, truncated=torch.tensor([False]))
    padded = RolloutBatch.concat([short, wide]).select([0, 1])
    assert padded.tokens.shape[1] > short.tokens.shape[1]
    for part in parts:
        assert apply(part, padded) == apply(part, short)


def test_shapings_are_applied_in_the_order_of_the_config() -> None:
    clip, scale = ClipRewardConfig(high=1.0), ScaleRewardConfig(factor=3.0, shift=1.0)
    batch = responses([1, 1], [2.0, 0.5])
    first, _ = build_shaping(
        AlgorithmConfig(reward_shaping=(clip, scale)), max_new_tokens=64
    ).rewards(batch)
    second, _ = build_shaping(
        AlgorithmConfig(reward_shaping=(scale, clip)), max_new_tokens=64
    ).rewards(batch)
    assert first.rewards is not None
    assert second.rewards is not None
    assert first.rewards.tolist() == [4, 2.5]
    assert second.rewards.tolist() == [1, 1]
    assert first.rewards.dtype == torch.float32


def test_a_kind_may_come_twice_and_reports_twice() -> None:
    shapings = (ClipRewardConfig(high=1.0), ScaleRewardConfig(factor=3.0), ClipRewardConfig(low=2))
    shaping = build_shaping(AlgorithmConfig(reward_shaping=shapings), max_new_tokens=64)
    shaped, metrics = shaping.rewards(responses([1, 1, 1, 1], [2.0, 1.0, 0.5, 0.0]))
    assert shaped.rewards is not None
    assert shaped.rewards.tolist() == [3, 3, 2, 2]
    assert metrics.values_by_name() == {
        "shaping/reward/clip/clipped_fraction": 0.25,
        "shaping/reward/clip_2/clipped_fraction": 0.5,
        "shaping/reward/mean": 2.5,
    }


def test_a_greedy_baseline_is_scaled_and_clipped_with_the_rewards_but_not_penalized() -> None:
    batch = replace(responses([2, 9], [1.0, 1.0]), baseline_rewards=torch.tensor([2.0, 0.5]))
    shapings = (
        ScaleRewardConfig(factor=2.0),
        ClipRewardConfig(high=3.0),
        OverlongPenaltyConfig(max_tokens=9, buffer_tokens=4),
        LengthPenaltyConfig(),
    )
    shaped, _ = build_shaping(AlgorithmConfig(reward_shaping=shapings), max_new_tokens=64).rewards(
        batch
    )
    assert shaped.baseline_rewards is not None
    assert shaped.rewards is not None
    assert shaped.baseline_rewards.tolist() == [3, 1]
    assert shaped.rewards.tolist() == [2.5, 0.5]


def test_without_any_shaping_only_the_estimate_is_added() -> None:
    batch = rollout_batch()
    shaping = build_shaping(AlgorithmConfig(), max_new_tokens=64)
    shaped, metrics = shaping.add_advantages(batch, Grpo(GrpoConfig()))
    assert len(metrics) == 0
    assert shaped.rewards is batch.rewards
    assert shaped.loss_mask is batch.loss_mask
    assert shaped.sample_weights is None
    assert shaped.token_rewards is None
    assert shaped.advantages is not None
    assert torch.equal(shaped.advantages, Grpo(GrpoConfig())(batch).advantages_BT)
    assert shaping.state() == {}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ClipRewardConfig(), "without a bound"),
        (lambda: ClipRewardConfig(low=1.0, high=0.0), "low = 1 must lie below high = 0"),
        (lambda: ScaleRewardConfig(), "change nothing"),
        (lambda: ScaleRewardConfig(factor=0.0), "greater than 0"),
        (lambda: OverlongPenaltyConfig(max_tokens=4, buffer_tokens=5), "cannot be more"),
        (lambda: LengthPenaltyConfig(coef=-1.0), "greater than 0"),
        (lambda: NormalizeRewardConfig(mean="group", std="group", eps=0.0), "greater than 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: object, reason: str) -> None:
    assert callable(make)
    with pytest.raises(ValidationError, match=reason):
        make()


def test_the_length_penalty_needs_siblings() -> None:
    config = AlgorithmConfig(reward_shaping=(LengthPenaltyConfig(),))
    assert config.needs[Need.SIBLINGS] == ["grpo", "length_penalty"]


def test_rewards_of_turns_count_for_passing() -> None:
    batch = responses([2, 4, 6], [0.0, 0.0, 0.0])
    won = replace(batch, turn_rewards=torch.tensor([1.0, 0.0, 1.0]))
    assert apply(LengthPenalty(LengthPenaltyConfig()), won) == pytest.approx([0.5, 0.0, -0.5])


def test_the_limit_of_an_episode_counts_what_others_say() -> None:
    batch = responses([2, 4, 6], [0.0, 0.0, 0.0])
    config = AlgorithmConfig(reward_shaping=(OverlongPenaltyConfig(buffer_tokens=4),))
    for episodes, want in ((False, [0.0, 0.0, 0.0]), (True, [0.0, -0.25, -0.75])):
        shaping = build_shaping(config, max_new_tokens=10, episodes=episodes)
        shaped, _ = shaping.rewards(batch)
        assert shaped.rewards is not None
        assert shaped.rewards.tolist() == pytest.approx(want)
    longest = replace(batch, row_tokens=torch.tensor([9, 9, 9]))
    shaped, _ = build_shaping(config, max_new_tokens=10, episodes=True).rewards(longest)
    assert shaped.rewards is not None
    assert shaped.rewards.tolist() == pytest.approx([-0.75] * 3)
    named = AlgorithmConfig(reward_shaping=(OverlongPenaltyConfig(max_tokens=6, buffer_tokens=4),))
    shaped, _ = build_shaping(named, max_new_tokens=99, episodes=True).rewards(batch)
    assert shaped.rewards is not None
    assert shaped.rewards.tolist() == pytest.approx([0.0, -0.5, -1.0]), "tokens of the policy"
