"""Check of advantage estimators that users bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from roll.algorithms.loss_interface import Samples
from roll.algorithms.own.bases import Advantage, SampleAdvantage
from roll.algorithms.own.calls import OwnSampleEstimator, own_estimator
from roll.config.algorithm.needs import Need
from roll.core.batches import RolloutBatch
from roll.core.sample_table import SampleTable
from roll.testing.rules import (
    case,
    littered,
    require,
    require_equal,
    unchanged,
    widened,
)
from roll.testing.samples import batch, table

KEY = "algorithm.advantage"


def check_advantage(part: Advantage | SampleAdvantage) -> None:
    """Raise AssertionError, which names the rule, if an advantage estimator breaks one.

    The rules: advantages have the expected shape and are finite, also where rewards are equal,
    huge, or of one prompt; two calls give the same; they do not depend on the order of samples, on
    the ids of groups, on padding, or on numbers outside the loss mask; nothing is written into the
    samples. A `SampleAdvantage` gives the same with and without tokens.

    Raises:
        AssertionError: the part breaks a rule.
    """
    samples = _seen(part, table())
    found = try_advantage(part)
    again = _advantages(part, samples, "a second call")
    require(torch.equal(found, again), "two calls on the same samples give different advantages")
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(2))
    moved = _advantages(part, samples.select(order), "samples in another order")
    require_equal(moved, found[order], "advantages depend on the order of the samples")
    renamed = replace(samples, group_ids=90 - 7 * samples.group_ids)
    other = _advantages(part, renamed, "other ids of groups")
    require_equal(other, found, "advantages depend on the numbers of the group ids")
    for what, odd in _extremes(table(), needs_siblings=Need.SIBLINGS in part.all_needs):
        _advantages(part, _seen(part, odd), what)
    if isinstance(part, SampleAdvantage):
        told = _advantages(part, batch(table()), "samples with their tokens")
        require_equal(told, found, "advantages differ between samples with and without tokens")
    else:
        _check_tokens(part, batch(table()), found)


def try_advantage(part: Advantage | SampleAdvantage) -> Tensor:
    """Return the advantages of made-up samples, float `[B]` or `[B, T]`; AssertionError if the part
    raises an error, or returns something else."""
    return _advantages(part, _seen(part, table()), "samples with rewards from 0 to 1")


def _seen(part: Advantage | SampleAdvantage, samples: SampleTable) -> Samples:
    """Return the samples as the part gets them in a run: with tokens if it needs these."""
    return samples if isinstance(part, SampleAdvantage) else batch(samples)


def _advantages(part: Advantage | SampleAdvantage, samples: Samples, what: str) -> Tensor:
    """Return what the part makes of the samples; AssertionError, which names the case, if it raises
    an error, returns something else, or writes into the samples."""
    estimator = own_estimator(part, KEY)
    with case(what), unchanged(samples, part.kind):
        if isinstance(estimator, OwnSampleEstimator):
            return estimator.per_sample(samples)
        assert isinstance(samples, RolloutBatch), "an estimator of tokens gets tokens"
        return estimator(samples).advantages_BT


def _extremes(samples: SampleTable, *, needs_siblings: bool) -> Iterator[tuple[str, SampleTable]]:
    """Yield what is odd about samples, and the samples."""
    rewards = samples.rewards
    assert rewards is not None
    yield "rewards that are all 0", replace(samples, rewards=0 * rewards)
    yield "rewards that are all 1", replace(samples, rewards=0 * rewards + 1)
    yield "rewards of a million", replace(samples, rewards=1e6 * (rewards - 0.5))
    yield "one prompt", samples.select(range(4))
    yield "a sample that is not trained on", samples.keep(torch.arange(len(samples)) > 0)
    yield "a prompt with one sample", samples.select([0, 4, 5, 6])
    if not needs_siblings:
        yield "one sample", samples.select([0])


def _check_tokens(part: Advantage, rows: RolloutBatch, found_BT: Tensor) -> None:
    """Raise AssertionError if the advantages of tokens depend on padding, or on numbers outside the
    loss mask."""
    wide_BT = _advantages(part, widened(rows, 5), "more padding")
    narrow_BT = wide_BT[:, : found_BT.shape[1]]
    require_equal(narrow_BT, found_BT, "advantages depend on padding")
    odd = littered(rows, rows.loss_mask)
    odd_BT = _advantages(part, odd, "large numbers outside the loss mask")
    require_equal(odd_BT, found_BT, "advantages depend on numbers outside the loss mask")
