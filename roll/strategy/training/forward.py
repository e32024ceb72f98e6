"""The forward passes that PyTorch backends share: of a micro-batch, of nothing, of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from roll.algorithms import logprobs
from roll.algorithms.teacher_divergence import outputs_by_teacher
from roll.core.batches import TokenBatch, TrainBatch
from roll.strategy.training import microbatch
from roll.strategy.training.token_model import ForwardRequest, ModelOutputs, TokenModel

T = TypeVar("T")


def run(
    model: TokenModel[T], batch: TokenBatch, needed_BT: Tensor, device: torch.device, entropy: bool
) -> ModelOutputs:
    """What the model's `forward` returns of the needed tokens of one micro-batch, on `device`."""
    teacher_outputs = batch.teacher_outputs if isinstance(batch, TrainBatch) else None
    outputs: ModelOutputs = model(
        batch.tokens.to(device),
        ForwardRequest(
            positions_N=logprobs.positions(needed_BT).to(device),
            lengths=batch.lengths.tolist(),
            entropy=entropy,
            teacher_outputs=None
            if teacher_outputs is None
            else outputs_by_teacher(teacher_outputs, needed_BT, device),
        ),
    )
    return outputs


def token_terms(
    model: TokenModel[T], batch: TokenBatch, needed_BT: Tensor, device: torch.device, entropy: bool
) -> T:
    """Terms of the needed tokens of one micro-batch, on `device`; zero at the others."""
    return model.terms(run(model, batch, needed_BT, device, entropy))


def empty_pass(model: TokenModel[T], device: torch.device) -> Tensor:
    """A pass over nothing, as a loss of zero: a rank without rows left still joins collectives."""
    tokens_BT = torch.zeros(1, 2, dtype=torch.long, device=device)
    outputs: ModelOutputs = model(tokens_BT, ForwardRequest(tokens_BT.new_empty(0), [2]))
    return outputs.values.sum()


def score(
    model: TokenModel[T],
    batch: TokenBatch,
    *,
    device: torch.device,
    max_tokens: int,
    entropy: bool,
    agree: Callable[[int], int],
) -> T:
    """The terms of all real tokens, or of those that the model speaks of, on the CPU.

    Args:
        agree: the number of passes, given this rank's own; the same on every rank.
    """
    parts = microbatch.plan(batch.lengths.tolist(), max_tokens, unit=batch.unit, packed=model.packs)
    passes = agree(len(parts))

    def outputs() -> Iterator[tuple[list[int], ModelOutputs]]:
        for rows in parts:
            micro = microbatch.take(batch, rows)
            yield rows, run(model, micro, model.needed(micro), device, entropy)
        for _ in range(passes - len(parts)):
            empty_pass(model, device)

    with torch.no_grad():
        return model.collect(batch, outputs())
