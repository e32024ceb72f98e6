"""Batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar, cast

from roll.algorithms.shaping.sample_weights import weigh_samples
from roll.algorithms.weights import row_weights
from roll.config.algorithm import Aggregation
from roll.core.batches import RolloutBatch, TokenBatch
from roll.core.pictures import patches_of_rows
from roll.core.sample_table import SampleTable
from roll.data.balance import balanced_order

B = TypeVar("B", bound=TokenBatch | SampleTable)
S = TypeVar("S", RolloutBatch, SampleTable)


def updates(
    batch: S,
    *,
    epochs: int = 1,
    num_updates: int,
    ranks: int,
    aggregation: Aggregation,
    aggregation_tokens: int | None = None,
    prepare: Callable[[S], S] | None = None,
) -> Iterator[S]:
    """Yield one batch for each optimizer step on the samples of a step.

    Each batch holds `token_weights`, computed from all rows of the batch. The rows are ordered so
    that the ranks get equally many rows and about equally many tokens.

    Args:
        batch: all samples of the step.
        epochs: number of passes over the samples.
        num_updates: number of optimizer steps in one pass.
        ranks: number of data-parallel ranks.
        aggregation: rule that combines the losses of all tokens into one number.
        aggregation_tokens: `max_tokens` of the aggregation.
        prepare: function that the loss applies to the whole batch of an update, before the batch is
            split into micro-batches.

    Raises:
        ValueError: the samples do not divide evenly over the updates, or those over the ranks; or
            see `row_weights`.
    """
    for update in [*batch.split(num_updates)] * epochs:
        if prepare is not None:
            update = prepare(update)
        yield balanced(weighed(update, aggregation, aggregation_tokens), ranks)


def weighed(update: S, aggregation: Aggregation, aggregation_tokens: int | None) -> S:
    """Return all rows of an update with their `token_weights`, in which `sample_weights` are
    contained: float32, `[B]` in a `SampleTable`, `[B, T]` in a `RolloutBatch`. The arguments are
    those of `updates`; ValueError: see `row_weights`."""
    tokens_B = update.trained_tokens()
    weights_B = row_weights(
        tokens_B, aggregation, max_tokens=aggregation_tokens, samples=update.sample_ids
    ).float()
    if update.sample_weights is not None:
        weights_B1 = weights_B[:, None]
        weights_B = weigh_samples(weights_B1, update.sample_weights, tokens_B=tokens_B)[:, 0]
    if isinstance(update, SampleTable):
        return replace(update, token_weights=weights_B)
    return replace(update, token_weights=weights_B[:, None] * update.loss_mask)


def balanced(batch: B, ranks: int) -> B:
    """Return the rows in an order in which consecutive equal parts, one per rank, hold about
    equally many tokens, where a patch of a picture counts as a token, too. The rows of a unit (a
    pair) stay together. ValueError if the units do not divide evenly over the ranks."""
    unit = batch.unit
    patches = patches_of_rows(batch.pictures, len(batch))
    sizes = [own + more for own, more in zip(batch.lengths.tolist(), patches, strict=True)]
    order = balanced_order([sum(sizes[i : i + unit]) for i in range(0, len(sizes), unit)], ranks)
    return cast(B, batch.select([one * unit + i for one in order for i in range(unit)]))
