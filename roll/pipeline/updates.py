"""Functions that pipelines share: batches of one optimizer step, and files of sample texts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from roll.algorithms.shaping.sample_weights import weigh_samples
from roll.algorithms.weights import token_weights
from roll.config.algorithm import Aggregation
from roll.core.batches import RolloutBatch, TokenBatch
from roll.core.metrics import Mean, Metrics
from roll.data.balance import balanced_order
from roll.rollout.types import Group, ScoredSample

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=TokenBatch)


def updates(
    batch: RolloutBatch,
    *,
    epochs: int = 1,
    num_updates: int,
    ranks: int,
    aggregation: Aggregation,
    aggregation_tokens: int | None = None,
    prepare: Callable[[RolloutBatch], RolloutBatch] | None = None,
) -> Iterator[RolloutBatch]:
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
    """
    for update in [*batch.split(num_updates)] * epochs:
        if prepare is not None:
            update = prepare(update)
        weights_BT = token_weights(update.loss_mask, aggregation, max_tokens=aggregation_tokens)
        if update.sample_weights is not None:
            weights_BT = weigh_samples(weights_BT, update.sample_weights)
        yield balanced(replace(update, token_weights=weights_BT), ranks)


def balanced(batch: B, ranks: int) -> B:
    """Return the rows in an order in which consecutive equal parts, one per rank, hold about
    equally many tokens. The rows of a unit (a pair) stay together."""
    unit = batch.unit
    lengths = batch.lengths.view(-1, unit).sum(1).tolist()
    order = balanced_order(lengths, ranks)
    return batch.select([one * unit + i for one in order for i in range(unit)])


def advantage_metrics(update: RolloutBatch) -> Metrics:
    """Return metrics of the advantages and token weights of one update.

    `advantage/mean` is weighted as the loss is; the loss of an on-policy update must be minus this
    number. `advantage/abs_mean` is an unweighted mean over trained tokens. `token_weights/sum` is 1
    if the aggregation is a mean.
    """
    weights_BT = update.require("token_weights", made_by="updates").double()
    advantages_BT = update.require("advantages", made_by="add_advantages").double()
    trained = advantages_BT[update.loss_mask]
    return Metrics(
        {
            "advantage/mean": Mean((advantages_BT * weights_BT).sum().item()),
            "advantage/abs_mean": Mean(trained.abs().sum().item(), len(trained)),
            "token_weights/sum": Mean(weights_BT.sum().item()),
        }
    )


def dump_rollouts(
    path: Path, groups: Sequence[Group], *, limit: int, read: Callable[[Sequence[int]], str]
) -> None:
    """Write the first `limit` samples as JSONL, for people to read. If the file cannot be written,
    log a warning.

    Args:
        path: file to write; its folder is created.
        groups: groups of samples.
        limit: largest number of samples to write.
        read: function that decodes token ids to text.
    """
    samples = [scored for group in groups for scored in group.samples][:limit]
    rows = [_readable(scored, read) for scored in samples]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # the file is only for people: a full disk must not end the run
        logger.warning("%s could not be written (%s); the run goes on", path, error.strerror)
        with suppress(OSError):
            path.unlink()


def _readable(scored: ScoredSample, read: Callable[[Sequence[int]], str]) -> dict[str, object]:
    """Return a sample as plain JSON. Its prompt is decoded from the tokens, to show what the model
    reads: the text differs if the tokenizer does not know all of its characters."""
    sample = scored.sample
    versions = sample.completion.versions
    return {
        "id": sample.id,
        "tag": sample.tag,
        "prompt": read(sample.prompt.tokens),
        "response": sample.response_text,
        "ground_truth": sample.answer,
        "reward": scored.reward if scored.has_reward else None,
        "rewards": scored.by_name,
        "failed_rewards": scored.failed,
        "parts": scored.parts,
        "weight_version": [versions.oldest, versions.newest] if len(versions) else None,
        "finish_reason": sample.completion.finish.value,
        "prompt_tokens": len(sample.prompt.tokens),
        "response_tokens": sample.num_response_tokens,
    }
