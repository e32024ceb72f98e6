"""Shaping that users bring: the same numbers as built-in shaping, and its errors."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from roll.algorithms.build import build_advantage
from roll.algorithms.shaping.build import Shaping, build_shaping
from roll.config.algorithm import AlgorithmConfig, Need, ReinforceConfig, ScaleRewardConfig
from roll.core.batches import RolloutBatch
from roll.core.errors import RollError
from tests.own_parts import Centred, Counted, Doubled, Halved, Lucky, Weightless
from tests.tiny import rollout_batch


def shaping(**parts: Any) -> tuple[Shaping, AlgorithmConfig]:
    config = AlgorithmConfig(advantage=ReinforceConfig(), **parts)
    return build_shaping(config, max_new_tokens=12), config


def shaped(**parts: Any) -> tuple[RolloutBatch, dict[str, float]]:
    found, config = shaping(**parts)
    batch, metrics = found.add_advantages(rollout_batch(), build_advantage(config))
    return batch, metrics.values_by_name()


def test_a_reward_shaping_equals_the_built_in_one_to_the_bit() -> None:
    own, _ = shaped(reward_shaping=(Halved(),))
    built_in, _ = shaped(reward_shaping=(ScaleRewardConfig(factor=0.5),))
    assert own.rewards is not None
    assert built_in.rewards is not None
    assert torch.equal(own.rewards, built_in.rewards)


def test_what_a_shaping_keeps_is_in_the_checkpoint_and_begins_anew_in_a_new_run() -> None:
    first, config = shaping(reward_shaping=(Centred(),))
    for _ in range(2):
        first.rewards(rollout_batch())
    kept = first.state()
    assert kept["reward/Centred"]["count"] == 16
    again = build_shaping(config, max_new_tokens=12)
    assert again.state()["reward/Centred"]["count"] == 0
    again.load(kept)
    ours, theirs = (each.rewards(rollout_batch(seed=1)) for each in (first, again))
    assert torch.equal(ours[0].rewards, theirs[0].rewards)  # type: ignore[arg-type]
    assert "shaping/reward/Centred/mean" in ours[1].values_by_name()


def test_a_mask_leaves_out_samples() -> None:
    batch, metrics = shaped(masks=(Lucky(),), reward_shaping=(ScaleRewardConfig(shift=-0.5),))
    assert metrics["shaping/mask/Lucky/masked_fraction"] == 0, "masks see unshaped rewards"
    assert torch.equal(batch.loss_mask, rollout_batch().loss_mask)


def test_an_advantage_shaping_is_zero_outside_the_mask() -> None:
    batch, metrics = shaped(advantage_shaping=(Doubled(),))
    plain, _ = shaped()
    assert batch.advantages is not None
    assert plain.advantages is not None
    mask_BT = batch.loss_mask
    assert torch.equal(batch.advantages, (2 * plain.advantages + 1) * mask_BT)
    assert metrics["shaping/advantage/Doubled/added"] == 1


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (
            {"masks": (Lucky(), Counted())},
            "algorithm.masks.1: tests.own_parts:Counted returned tensor([0, 0, 1, 1",
        ),
        (
            {"sample_weights": (Weightless(),)},
            "algorithm.sample_weights.0: tests.own_parts:Weightless returned a weight of 0; "
            "expected weights above zero",
        ),
    ],
)
def test_a_wrong_result_names_the_key(parts: dict[str, Any], told: str) -> None:
    with pytest.raises(RollError) as caught:
        shaped(**parts)
    assert str(caught.value).startswith(told)


class Teachable(Weightless):
    """Says that it needs teachers."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEACHER})


class Comparing(Doubled):
    """Says that it needs a reference."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.REFERENCE})


def test_what_a_weight_or_an_advantage_shaping_needs_is_asked_for() -> None:
    _, config = shaping(sample_weights=(Teachable(),), advantage_shaping=(Comparing(),))
    assert config.needs.keys() == {Need.TEACHER, Need.REFERENCE}
