"""Forward passes of a micro-batch, of an empty micro-batch and of a batch, in plain PyTorch."""

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
    """Run the model's `forward` for the needed tokens of one micro-batch; results are on `device`.

    Collective if ranks share the model or rows. Position 0 is left out.

    Args:
        needed_BT: bool mask of the needed tokens, on the CPU.
        entropy: also compute the entropy at each needed token.
    """
    teacher_outputs = batch.teacher_outputs if isinstance(batch, TrainBatch) else None
    positions_N = logprobs.positions(needed_BT)
    temperatures_N = None
    if batch.temperatures is not None:
        temperatures_N = batch.temperatures[positions_N // needed_BT.shape[1]].to(device)
    outputs: ModelOutputs = model(
        batch.tokens.to(device),
        ForwardRequest(
            positions_N=positions_N.to(device),
            temperatures_N=temperatures_N,
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
    """Compute the terms of a micro-batch's needed tokens, `[B, T]` on `device`.

    They are 0 at other tokens and at position 0. A teacher's terms are empty. Arguments: see `run`.
    """
    return model.terms(run(model, batch, needed_BT, device, entropy))


def empty_pass(model: TokenModel[T], device: torch.device) -> Tensor:
    """Run a forward pass without needed tokens and return a loss of zero to run backward from.

    A rank that has fewer micro-batches than others uses such passes to join their collectives.
    """
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
    """Compute the terms of the tokens that `model.needed` selects, on the CPU, without gradients.

    Collective if `agree` is, or ranks share the model. The caller sets evaluation mode.

    Args:
        max_tokens: maximum number of tokens in a micro-batch, padding included.
        agree: maps this rank's number of passes to the number of passes that every rank runs.
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
