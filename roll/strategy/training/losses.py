"""Forward passes and losses of one update, micro-batch by micro-batch, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from roll.algorithms.loss_interface import TermsLoss, reads_entropy
from roll.core.batches import TrainBatch
from roll.strategy.training import forward, microbatch
from roll.strategy.training.reduce import LossMetrics, max_over_ranks, micro_loss
from roll.strategy.training.token_model import TokenModel

T = TypeVar("T")
B = TypeVar("B", bound=TrainBatch)


def micro_losses(
    model: TokenModel[T],
    batch: B,
    loss: TermsLoss[T, B],
    metrics: LossMetrics,
    *,
    device: torch.device,
    max_tokens: int,
) -> Iterator[tuple[Tensor, bool]]:
    """Yield the loss of each micro-batch, and whether the micro-batch is the last. Collective.

    Every rank yields the same number of losses: a rank without rows left runs empty passes. The
    caller must run the backward pass of each loss before it takes the next one.

    Args:
        metrics: collects the metrics of all micro-batches.
        max_tokens: maximum number of tokens in a micro-batch, padding and patches included.

    Raises:
        ValueError: `batch.token_weights` is not set.
        ConfigError: rows have pictures, and the model reads none.
    """
    batch.require("token_weights", made_by="token_weights")
    tower = forward.runs_tower(model, batch, partial(max_over_ranks, device=device))
    # Without pictures nothing else has a gradient; that of the blank one is zero.
    tower = tower or model.trains_tower_alone
    entropy = reads_entropy(loss)
    parts = microbatch.plan_of(batch, max_tokens, packed=model.packs, border=model.border)
    passes = max_over_ranks(len(parts), device)
    for i in range(passes):
        if i < len(parts):
            micro = microbatch.take(batch, parts[i])
            terms_of = partial(
                forward.token_terms, model, micro, device=device, entropy=entropy, tower=tower
            )
            total = micro_loss(micro, terms_of, loss, metrics, device)
        else:
            total = forward.empty_pass(model, device, tower=tower)
        yield total, i == passes - 1
