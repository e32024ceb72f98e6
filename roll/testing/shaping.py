"""Checks of the shaping that users bring."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from roll.algorithms.own.shaping import (
    AdvantageShaping,
    OwnAdvantageShaping,
    OwnMask,
    OwnSampleWeight,
    RewardShaping,
    SampleMask,
    SampleWeight,
    own_reward_shaping,
)
from roll.algorithms.shaping.rewards import Rewards
from roll.core.sample_table import SampleTable
from roll.testing.rules import case, require, require_equal, unchanged
from roll.testing.samples import batch, table


def check_reward_shaping(part: RewardShaping) -> None:
    """Raise AssertionError, which names the rule, if a reward shaping breaks one.

    The rules: rewards keep their shape and are finite, also where they are equal or huge; a new
    part gives the same again, in any order of the samples; the samples stay as they are; what
    `state` returns, `load` restores.
    """
    samples = table()
    found = _shaped(part, samples, "samples with rewards from 0 to 1")
    again = _shaped(part, samples, "a new part")
    require(torch.equal(found, again), "a new part gives other rewards for the same samples")
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(2))
    moved = _shaped(part, samples.select(order), "samples in another order")
    require_equal(moved, found[order], "rewards depend on the order of the samples")
    assert samples.rewards is not None
    for what, factor in (("rewards that are all 0", 0.0), ("rewards of a million", 1e6)):
        _shaped(part, replace(samples, rewards=factor * samples.rewards), what)
    if hasattr(part, "state") and hasattr(part, "load"):
        _check_state(part, samples)


def try_reward_shaping(part: RewardShaping) -> None:
    """Raise AssertionError if the part fails on made-up samples."""
    _shaped(part, table(), "samples with rewards from 0 to 1")


def _rewards(samples: SampleTable) -> Rewards:
    total_B, baseline_B = samples.rewards, samples.baseline_rewards
    assert total_B is not None
    return Rewards(total_B.double(), None if baseline_B is None else baseline_B.double())


def _shaped(part: RewardShaping, samples: SampleTable, what: str) -> Tensor:
    """Return the rewards that a copy of the part makes; AssertionError, which names the case, if it
    fails or writes into the samples."""
    own = own_reward_shaping(part.model_copy(deep=True), "algorithm.reward_shaping")
    with case(what), unchanged(samples, part.kind):
        return own(_rewards(samples), samples)[0].total_B


def _check_state(part: RewardShaping, samples: SampleTable) -> None:
    """Raise AssertionError unless a part that loads the state of another goes on as it does."""
    first, second = part.model_copy(deep=True), part.model_copy(deep=True)
    first(_rewards(samples), samples)
    second.load(first.state())  # type: ignore[attr-defined]
    later = table(seed=5)
    ours, theirs = (one(_rewards(later), later)[0].total_B for one in (first, second))
    require_equal(theirs, ours, "after `load` the part does not go on as that which gave `state`")


def check_sample_mask(part: SampleMask) -> None:
    """Raise AssertionError, which names the rule, if a mask breaks one: its result is bool, one per
    sample, the same at each call and in any order of the samples, which it leaves as they are."""
    _check_choice(part, lambda samples: OwnMask(part, "algorithm.masks")(samples).double())


def check_sample_weight(part: SampleWeight) -> None:
    """Raise AssertionError, which names the rule, if a weight breaks one: its result is above zero,
    one per sample, the same at each call and in any order of the samples, which it leaves as they
    are."""
    _check_choice(part, lambda samples: OwnSampleWeight(part, "algorithm.sample_weights")(samples))


def _check_choice(part, choose) -> None:  # type: ignore[no-untyped-def]
    """Check the rules that masks and weights share; `choose` returns float `[B]`."""
    samples = table()
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(2))
    with case("samples with rewards from 0 to 1"), unchanged(samples, part.kind):
        found = choose(samples)
    require(torch.equal(found, choose(samples)), "two calls give different results")
    with case("samples in another order"):
        moved = choose(samples.select(order))
    require_equal(moved, found[order], "the result depends on the order of the samples")
    with case("samples with their tokens"):
        told = choose(batch(samples))
    require_equal(told, found, "the result differs between samples with and without tokens")


def check_advantage_shaping(part: AdvantageShaping) -> None:
    """Raise AssertionError, which names the rule, if an advantage shaping breaks one.

    The rules: advantages keep their shape and are finite, also where all are equal; two calls give
    the same; the result depends neither on the order of samples, nor on padding, nor on numbers
    outside the loss mask.
    """
    own = OwnAdvantageShaping(part, "algorithm.advantage_shaping")
    mask_BT = batch(table()).loss_mask
    g = torch.Generator().manual_seed(6)
    advantages_BT = torch.randn(mask_BT.shape, generator=g) * mask_BT
    with case("advantages of both signs"):
        found_BT = own(advantages_BT.clone(), mask_BT)[0]
    with case("a second call"):
        again_BT = own(advantages_BT.clone(), mask_BT)[0]
    require(torch.equal(found_BT, again_BT), "two calls give different advantages")
    order = torch.randperm(len(mask_BT), generator=g)
    with case("samples in another order"):
        moved_BT = own(advantages_BT[order], mask_BT[order])[0]
    require_equal(moved_BT, found_BT[order], "advantages depend on the order of the samples")
    with case("large numbers outside the loss mask"):
        odd_BT = own(advantages_BT.masked_fill(~mask_BT, 1e3), mask_BT)[0]
    require_equal(odd_BT, found_BT, "advantages depend on numbers outside the loss mask")
    wide = [torch.nn.functional.pad(each, [0, 5]) for each in (advantages_BT, mask_BT)]
    with case("more padding"):
        padded_BT = own(*wide)[0]
    width = mask_BT.shape[1]
    require_equal(padded_BT[:, :width], found_BT, "advantages depend on padding")
    for what, value in (("advantages that are all 0", 0.0), ("advantages that are all 1", 1.0)):
        with case(what):
            own(torch.full_like(advantages_BT, value) * mask_BT, mask_BT)
