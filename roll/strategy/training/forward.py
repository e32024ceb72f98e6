"""Forward passes of a micro-batch, of an empty micro-batch and of a batch, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from roll.algorithms import logprobs
from roll.algorithms.teacher_divergence import outputs_by_teacher
from roll.core.batches import TokenBatch, TrainBatch
from roll.core.errors import ConfigError
from roll.models.vision.inputs import PictureInputs, blank_inputs
from roll.models.vision.parts import FAMILIES
from roll.models.vision.tower import Tower
from roll.strategy.training import microbatch
from roll.strategy.training.token_model import ForwardRequest, ModelOutputs, TokenModel

T = TypeVar("T")


def runs_tower(model: TokenModel[T], batch: TokenBatch, agree: Callable[[int], int]) -> bool:
    """Return whether the passes of a batch run the model's vision part: if any row of any rank has
    pictures. Then they all do, because ranks that share the model run the same modules. Collective
    if the model reads pictures and `agree` is collective.

    Args:
        agree: returns the largest number of all ranks.

    Raises:
        ConfigError: rows have pictures, and the model reads none.
    """
    some = batch.pictures is not None and any(each is not None for each in batch.pictures)
    if model.tower is not None:
        return bool(agree(int(some)))
    if some:
        raise ConfigError(
            "rows have pictures, and the model of this role reads none; name one that does "
            f"({', '.join(sorted(FAMILIES))})"
        )
    return False


def run(
    model: TokenModel[T],
    batch: TokenBatch,
    needed_BT: Tensor,
    device: torch.device,
    *,
    entropy: bool,
    squares: bool = False,
    tower: bool = False,
) -> ModelOutputs:
    """Run the model's `forward` for the needed tokens of one micro-batch; results are on `device`.

    Collective if ranks share the model or rows. Position 0 is left out.

    Args:
        needed_BT: bool mask of the needed tokens, on the CPU.
        entropy: also compute the entropy at each needed token.
        squares: also compute the sum of squared probabilities at each needed token.
        tower: result of `runs_tower`; with True, rows without pictures run the vision part, too.
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
            squares=squares,
            teacher_outputs=None
            if teacher_outputs is None
            else outputs_by_teacher(teacher_outputs, needed_BT, device),
            pictures=_pictures(model, batch, device) if tower else None,
        ),
    )
    return outputs


def token_terms(
    model: TokenModel[T],
    batch: TokenBatch,
    needed_BT: Tensor,
    device: torch.device,
    *,
    entropy: bool,
    tower: bool = False,
) -> T:
    """Compute the terms of a micro-batch's needed tokens, `[B, T]` on `device`.

    They are 0 at other tokens and at position 0. A teacher's terms are empty. Arguments: see `run`.
    """
    return model.terms(run(model, batch, needed_BT, device, entropy=entropy, tower=tower))


def empty_pass(model: TokenModel[T], device: torch.device, *, tower: bool) -> Tensor:
    """Run a forward pass without needed tokens and return a loss of zero to run backward from.

    A rank that has fewer micro-batches than others uses such passes to join their collectives.

    Args:
        tower: as for `run`.
    """
    tokens_BT = torch.zeros(1, 2, dtype=torch.long, device=device)
    blank = blank_inputs(_tower(model).part, device) if tower else None
    request = ForwardRequest(tokens_BT.new_empty(0), [2], pictures=blank)
    outputs: ModelOutputs = model(tokens_BT, request)
    return outputs.values.sum()


def score(
    model: TokenModel[T],
    batch: TokenBatch,
    *,
    device: torch.device,
    max_tokens: int,
    entropy: bool,
    agree: Callable[[int], int],
    squares: bool = False,
    passed: Callable[[], None] = lambda: None,
) -> T:
    """Compute the terms of the tokens that `model.needed` selects, on the CPU, without gradients.

    Collective if `agree` is, or ranks share the model. The caller sets evaluation mode.

    Args:
        max_tokens: maximum number of tokens in a micro-batch, padding and patches included.
        agree: maps this rank's number of passes to the number of passes that every rank runs.
        entropy, squares: as for `run`.
        passed: function that is called after each micro-batch.
    """
    tower = runs_tower(model, batch, agree)
    parts = microbatch.plan_of(batch, max_tokens, packed=model.packs, border=model.border)
    passes = agree(len(parts))

    def outputs() -> Iterator[tuple[list[int], ModelOutputs]]:
        for rows in parts:
            micro = microbatch.take(batch, rows)
            needed_BT = model.needed(micro)
            yield (
                rows,
                run(model, micro, needed_BT, device, entropy=entropy, squares=squares, tower=tower),
            )
            passed()
        for _ in range(passes - len(parts)):
            empty_pass(model, device, tower=tower)

    with torch.no_grad():
        return model.collect(batch, outputs())


def _pictures(model: TokenModel[T], batch: TokenBatch, device: torch.device) -> PictureInputs:
    """Fetch the pictures of a micro-batch; without any, return a blank one."""
    pictures = batch.pictures or [None] * len(batch)
    return _tower(model).inputs(batch.tokens, pictures, device)


def _tower(model: TokenModel[T]) -> Tower:
    """Return the vision part of a model that has one."""
    assert model.tower is not None
    return model.tower
