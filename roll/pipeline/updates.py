"""Steps that pipelines share: updates, rollout dumps. All they need are arguments."""

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
from roll.rollout.types import Group

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
    """The batches of all passes over a step's samples, one per optimizer step.

    Each carries the token weights of its own rows, taken over all ranks, and its rows are ordered
    so that the ranks' equal shares hold about equally many tokens.

    Args:
        epochs: passes.
        num_updates: of one pass.
        prepare: what the loss does to the whole of an update before it is split.
    """
    for update in [*batch.split(num_updates)] * epochs:
        if prepare is not None:
            update = prepare(update)
        weights_BT = token_weights(update.loss_mask, aggregation, max_tokens=aggregation_tokens)
        if update.sample_weights is not None:
            weights_BT = weigh_samples(weights_BT, update.sample_weights)
        yield balanced(replace(update, token_weights=weights_BT), ranks)


def balanced(batch: B, ranks: int) -> B:
    """The same rows, ordered so that the ranks' equal shares hold about equally many tokens; units
    (pairs) stay together."""
    unit = batch.unit
    lengths = batch.lengths.view(-1, unit).sum(1).tolist()
    order = balanced_order(lengths, ranks)
    return batch.select([one * unit + i for one in order for i in range(unit)])


def advantage_metrics(update: RolloutBatch) -> Metrics:
    """What the loss of an on-policy update must be: minus `advantage/mean`, which is weighted as
    the loss is. And the sum of the weights, which is 1 where the aggregation is a mean."""
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
    """The first `limit` samples as JSONL, for people.

    Args:
        read: tokens as the text that they stand for. A prompt is written as the model reads it,
            which is not its text where the tokenizer does not know all of that.
    """
    rows = []
    for scored in [scored for group in groups for scored in group.samples][:limit]:
        sample = scored.sample
        versions = sample.completion.versions
        rows.append(
            {
                "id": sample.id,
                "tag": sample.tag,
                "prompt": read(sample.prompt.tokens),
                "response": sample.response_text,
                "ground_truth": sample.answer,
                "reward": scored.reward if scored.has_reward else None,
                "rewards": scored.by_name,
                "failed_rewards": scored.failed,
                "parts": scored.parts,
                "weight_version": [min(versions), max(versions)] if versions else None,
                "finish_reason": sample.completion.finish.value,
                "prompt_tokens": len(sample.prompt.tokens),
                "response_tokens": sample.num_response_tokens,
            }
        )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # they are for people to read: a full disk need not end the run
        logger.warning("%s could not be written (%s); the run goes on", path, error.strerror)
        with suppress(OSError):
            path.unlink()
