"""Masks and weights of samples, and what they make of the weights per token."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import stdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.algorithms import Grpo, build_shaping, token_weights
from roll.algorithms.loss_interface import Estimate
from roll.algorithms.shaping.sample_weights import weigh_samples
from roll.config import load_config
from roll.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    ClipAdvantageConfig,
    DifficultyMaskConfig,
    DifficultyWeightConfig,
    GrpoConfig,
    LengthWeightConfig,
    MaskConfig,
    NormalizeRewardConfig,
    OverlongMaskConfig,
    SampleWeightConfig,
    SpreadMaskConfig,
)
from roll.config.errors import ConfigError
from roll.core.batches import RolloutBatch
from roll.pipeline.updates import updates
from tests.runs import write_task
from tests.tiny import rollout_batch


def three_groups(rewards: list[float]) -> RolloutBatch:
    return replace(rollout_batch(6), rewards=torch.tensor(rewards))


def masked(batch: RolloutBatch, *masks: MaskConfig) -> tuple[list[bool], dict[str, float]]:
    """Which rows still train, and the metrics; the rows that do must be untouched."""
    shaped, metrics = build_shaping(AlgorithmConfig(masks=masks), max_new_tokens=64).masks(batch)
    kept_B = shaped.loss_mask.any(1)
    assert torch.equal(shaped.loss_mask, batch.loss_mask & kept_B[:, None])
    return kept_B.tolist(), metrics.values_by_name()


def weighed(batch: RolloutBatch, *weights: SampleWeightConfig) -> list[float]:
    shaped, metrics = build_shaping(
        AlgorithmConfig(sample_weights=weights), max_new_tokens=64
    ).weights(batch)
    assert shaped.sample_weights is not None
    assert shaped.sample_weights.dtype == torch.float32
    found: list[float] = shaped.sample_weights.tolist()
    values = metrics.values_by_name()
    assert values["shaping/weight/max"] == pytest.approx(max(found))
    assert values["shaping/weight/mean"] == pytest.approx(sum(found) / len(found))
    return found


def test_truncated_responses_are_not_trained_on() -> None:
    truncated_B = torch.tensor([True, False, False, True, False, False])
    kept, metrics = masked(replace(rollout_batch(6), truncated=truncated_B), OverlongMaskConfig())
    assert kept == [False, True, True, False, True, True]
    assert metrics["shaping/mask/overlong/masked_fraction"] == pytest.approx(1 / 3)


def test_groups_outside_the_bounds_of_difficulty_are_not_trained_on() -> None:
    batch = three_groups([0, 0, 1, 0, 1, 1])
    kept, metrics = masked(batch, DifficultyMaskConfig(low=0.1, high=0.9))
    assert kept == [False, False, True, True, False, False]
    assert metrics["shaping/mask/difficulty/masked_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("bound", [0.1, 0.95])
def test_a_mean_on_a_bound_is_inside_in_spite_of_rounding(bound: float) -> None:
    # In float32 0.1 is a little more and 0.95 a little less than in the config's float64.
    batch = three_groups([bound] * 6)
    for low, high in ((bound, 2.0), (-2.0, bound)):
        assert masked(batch, DifficultyMaskConfig(low=low, high=high))[0] == [True] * 6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=1),
    st.floats(0.01, 0.99),
    st.randoms(),
)
def test_the_groups_whose_rewards_vary_most_are_kept(
    groups: list[list[float]], keep: float, dice: random.Random
) -> None:
    """In any order of the rows; against the standard deviations of the standard library. Rounding
    may decide between groups that vary alike."""
    rows = [(number, reward) for number, own in enumerate(groups) for reward in own]
    dice.shuffle(rows)
    batch = replace(
        rollout_batch(len(rows)),
        rewards=torch.tensor([reward for _, reward in rows]),
        group_ids=torch.tensor([number for number, _ in rows]),
    )
    kept, _ = masked(batch, SpreadMaskConfig(keep=keep))
    spread = [stdev(own) if len(own) > 1 else 0.0 for own in groups]
    best = {number for (number, _), one in zip(rows, kept, strict=True) if one}
    assert kept == [number in best for number, _ in rows]
    assert len(best) == ceil(round(keep * len(groups), 6))
    left = [spread[number] for number in range(len(groups)) if number not in best]
    assert min(spread[number] for number in best) >= max(left, default=0.0) - 1e-6


def test_a_share_of_groups_is_not_one_more_by_the_rounding_of_binary_numbers() -> None:
    """0.07 * 100 is 7.000000000000001."""
    batch = replace(
        rollout_batch(200),
        rewards=torch.arange(200) % 2 * torch.arange(200),
        group_ids=torch.arange(200) // 2,
    )
    assert sum(masked(batch, SpreadMaskConfig(keep=0.07))[0]) == 2 * 7


def test_the_spread_of_rewards_needs_several_samples(tmp_path: Path) -> None:
    path = write_task(
        tmp_path,
        algorithm={
            "advantage": {"kind": "reinforce"},
            "loss": [{"kind": "pg"}],
            "masks": [{"kind": "spread"}],
        },
    )
    with pytest.raises(ConfigError, match="spread"):
        load_config(path, ["data.samples_per_prompt=1"])


def test_a_sample_must_pass_all_masks() -> None:
    truncated_B = torch.tensor([False, False, True, False, False, False])
    batch = replace(three_groups([0, 0, 1, 0, 1, 0]), truncated=truncated_B)
    kept, metrics = masked(batch, OverlongMaskConfig(), DifficultyMaskConfig())
    assert kept == [False, False, False, True, True, True]
    assert metrics["shaping/mask/masked_fraction"] == 0.5


def test_difficulty_is_judged_by_the_rewards_before_they_are_shaped() -> None:
    config = AlgorithmConfig(
        reward_shaping=(NormalizeRewardConfig(mean="group", std="group"),),
        masks=(DifficultyMaskConfig(),),
        sample_weights=(DifficultyWeightConfig(min=1.0, max=2.0),),
    )
    shaped, _ = build_shaping(config, max_new_tokens=64).add_advantages(
        three_groups([0, 0, 1, 0, 1, 1]), Grpo(GrpoConfig())
    )
    assert shaped.sample_weights is not None
    assert shaped.loss_mask.any(1).tolist() == [False, False, True, True, False, False]
    assert shaped.sample_weights.tolist() == [2, 2, 1.5, 1.5, 1, 1]


def test_masked_samples_leave_the_weights_of_a_mean_a_mean() -> None:
    truncated_B = torch.tensor([True, False] * 3)
    batch = replace(rollout_batch(6), truncated=truncated_B)
    config = AlgorithmConfig(masks=(OverlongMaskConfig(),))
    shaped, _ = build_shaping(config, max_new_tokens=64).masks(batch)
    (update,) = updates(
        shaped, num_updates=1, ranks=1, aggregation=Aggregation.SEQUENCE_MEAN, aggregation_tokens=1
    )
    assert update.token_weights is not None
    per_row = update.token_weights.sum(1)
    assert sorted(per_row.tolist()) == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3])


def test_harder_prompts_weigh_more() -> None:
    batch = three_groups([0, 0, 1, 0, 5, 5])
    found = weighed(batch, DifficultyWeightConfig(min=0.5, max=2.0))
    assert found == [2, 2, 1.25, 1.25, 0.5, 0.5]


def test_shorter_responses_weigh_more() -> None:
    batch = rollout_batch(6)
    lengths = batch.loss_mask.sum(1).tolist()
    found = weighed(batch, LengthWeightConfig(min=0.5, max=1.5))
    span = max(lengths) - min(lengths)
    assert found == pytest.approx([1.5 - (n - min(lengths)) / span for n in lengths])


def test_equal_lengths_weigh_the_same_and_an_empty_response_is_no_short_one() -> None:
    batch = rollout_batch(4, longest=1)
    assert len(set(weighed(batch, LengthWeightConfig()))) == 1
    empty_BT = batch.loss_mask.clone()
    empty_BT[0] = False
    assert len(set(weighed(replace(batch, loss_mask=empty_BT), LengthWeightConfig()))) == 1
    batch = rollout_batch(6)
    lengths = batch.loss_mask.sum(1)
    assert len(lengths.unique()) > 2
    empty_BT = batch.loss_mask.clone()
    empty_BT[lengths.argmin()] = False
    found = weighed(replace(batch, loss_mask=empty_BT), LengthWeightConfig(min=0.5, max=1.5))
    assert sorted(found)[-2:] == [1.5, 1.5], "that of the shortest with tokens, and the empty one's"


def test_several_weights_multiply() -> None:
    batch = three_groups([0, 0, 1, 0, 1, 1])
    hard, short = DifficultyWeightConfig(), LengthWeightConfig()
    product = [a * b for a, b in zip(weighed(batch, hard), weighed(batch, short), strict=True)]
    assert weighed(batch, hard, short) == pytest.approx(product)


@pytest.mark.parametrize("mode", Aggregation)
@given(seed=st.integers(0, 500), scale=st.sampled_from([1e-3, 1.0, 70.0]))
@settings(max_examples=25)
def test_weighed_tokens_add_up_to_what_they_did_and_keep_their_ratios(
    mode: Aggregation, seed: int, scale: float
) -> None:
    batch = rollout_batch(5, seed=seed)
    sample_B = scale * (0.1 + torch.rand(5, generator=torch.Generator().manual_seed(seed)))
    plain_BT = token_weights(batch.loss_mask, mode, max_tokens=9)
    found_BT = weigh_samples(plain_BT, sample_B)
    rows = [
        (plain * weight).double()
        for plain, weight in zip(plain_BT.double(), sample_B.double(), strict=True)
    ]
    total = sum(row.sum().item() for row in rows)
    expected_BT = torch.stack(rows) * (plain_BT.double().sum().item() / total)
    assert found_BT.dtype == torch.float32
    torch.testing.assert_close(found_BT.double(), expected_BT, rtol=1e-6, atol=0)


def test_equal_sample_weights_change_nothing_and_none_trained_stays_none() -> None:
    plain_BT = token_weights(rollout_batch(4).loss_mask, Aggregation.TOKEN_MEAN)
    torch.testing.assert_close(
        weigh_samples(plain_BT, torch.full((4,), 3.7)), plain_BT, rtol=1e-6, atol=0
    )
    assert (weigh_samples(torch.zeros(2, 3), torch.ones(2)) == 0).all()
    assert (weigh_samples(torch.ones(2, 3), torch.zeros(2)) == 0).all()


def test_the_updates_of_a_step_are_weighed_each_for_itself() -> None:
    sample_B = torch.tensor([1.0, 1.0, 2.0, 100.0, 200.0, 300.0])
    batch = replace(rollout_batch(6), sample_weights=sample_B)
    for update in updates(
        batch, num_updates=2, ranks=1, aggregation=Aggregation.SEQUENCE_MEAN, aggregation_tokens=1
    ):
        assert update.token_weights is not None
        assert update.sample_weights is not None
        weights_B = update.token_weights.sum(1)
        expected_B = update.sample_weights / update.sample_weights.sum()
        torch.testing.assert_close(weights_B, expected_B)


def test_rows_in_another_order_get_the_same_masks_and_weights() -> None:
    order = torch.randperm(8)
    batch = replace(rollout_batch(8), truncated=torch.rand(8) < 0.3)
    config = AlgorithmConfig(
        masks=(OverlongMaskConfig(), DifficultyMaskConfig(low=0.4, high=0.6)),
        sample_weights=(DifficultyWeightConfig(), LengthWeightConfig()),
    )
    shaping = build_shaping(config, max_new_tokens=64)
    whole, _ = shaping.add_advantages(batch, Grpo(GrpoConfig()))
    shuffled, _ = shaping.add_advantages(batch.select(order), Grpo(GrpoConfig()))
    assert torch.equal(shuffled.loss_mask, whole.loss_mask[order])
    assert whole.sample_weights is not None
    assert shuffled.sample_weights is not None
    torch.testing.assert_close(shuffled.sample_weights, whole.sample_weights[order])


def test_a_masked_sample_keeps_its_place_among_its_siblings() -> None:
    truncated_B = torch.tensor([False, False, True, False])
    batch = replace(rollout_batch(4), truncated=truncated_B, rewards=torch.tensor([1.0, 0, 0, 1]))
    config = AlgorithmConfig(
        masks=(OverlongMaskConfig(),), advantage_shaping=(ClipAdvantageConfig(limit=0.5),)
    )
    shaped, metrics = build_shaping(config, max_new_tokens=64).add_advantages(
        batch, Grpo(GrpoConfig(std="none"))
    )
    assert shaped.advantages is not None
    rows = zip(shaped.advantages, batch.loss_mask, strict=True)
    first = [row_T[mask_T].unique().tolist() for row_T, mask_T in rows]
    assert first == [[0.5], [-0.5], [0], [0.5]]
    assert not shaped.loss_mask[2].any()
    assert metrics.values_by_name()["shaping/advantage/clip/clipped_fraction"] == 0


def test_the_estimator_sees_all_that_the_policy_wrote() -> None:
    batch = replace(rollout_batch(4), truncated=torch.tensor([False, False, True, False]))
    seen = []

    def estimator(batch: RolloutBatch) -> Estimate:
        seen.append(batch.loss_mask)
        return Estimate(batch.loss_mask.float(), returns_BT=2 * batch.loss_mask.float())

    config = AlgorithmConfig(masks=(OverlongMaskConfig(),))
    shaped, _ = build_shaping(config, max_new_tokens=64).add_advantages(batch, estimator)
    assert torch.equal(seen[0], batch.loss_mask)
    assert shaped.advantages is not None
    assert shaped.returns is not None
    assert torch.equal(shaped.advantages, shaped.loss_mask.float())
    assert torch.equal(shaped.returns, 2 * shaped.loss_mask.float())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DifficultyMaskConfig(low=0.9, high=0.1), "must not lie above"),
        (lambda: DifficultyWeightConfig(min=2.0, max=1.0), "must lie below"),
        (lambda: LengthWeightConfig(min=0.0), "greater than 0"),
        (lambda: LengthWeightConfig(min=1.0, max=1.0), "weigh nothing"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: object, reason: str) -> None:
    assert callable(make)
    with pytest.raises(ValidationError, match=reason):
        make()


def test_rewards_of_turns_count_for_the_difficulty_of_a_prompt() -> None:
    given = torch.tensor([0, 0, 1, 0, 1, 1.0])
    batch = replace(three_groups([0.0] * 6), turn_rewards=given)
    assert (
        masked(batch, DifficultyMaskConfig(low=0.1, high=0.9))[0]
        == [False] * 2 + [True] * 2 + [False] * 2
    )
    weight = DifficultyWeightConfig(min=0.5, max=1.5)
    assert weighed(batch, weight) == pytest.approx([1.5, 1.5, 1.0, 1.0, 0.5, 0.5])
