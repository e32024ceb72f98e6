"""Passes of micro-batches through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from mcore_adapter.local_tensors import unwrapped
from mcore_adapter.modeling.experts import balances, padding_here
from mcore_adapter.parallel.context import cut, joined, places_here
from mcore_adapter.parallel.schedule import run_schedule
from roll.core.batches import TokenBatch
from roll.strategy.megatron import groups
from roll.strategy.megatron.batches.micro import Micro
from roll.strategy.megatron.model import MegatronModel
from roll.strategy.megatron.pictures import Sight

B = TypeVar("B", bound=TokenBatch)
R = TypeVar("R")


def run(
    model: MegatronModel,
    micros: Sequence[Micro[B]],
    reduce: Callable[[Sequence[Tensor], Micro[B], B], tuple[Tensor, R]],
    *,
    forward_only: bool,
) -> list[tuple[Micro[B], R]]:
    """Run the forward pass and, unless `forward_only`, the backward pass of all micro-batches.

    Collective.

    Args:
        micros: result of `micro_batches`; at least one.
        reduce: computes the loss and a result to keep, from the last stage's output `[B, T, S]`, a
            micro-batch and its rows. The output are logits of the part of the vocabulary on this
            tensor parallel rank, one number per token, or the hidden states of a model with
            `tells_states`; that of packed rows is one row, with padding behind them. Ranks that
            share rows have the outputs of their own tokens, padding included. The logits of each
            layer that predicts further tokens follow, if the model returns them. The losses of all
            micro-batches are added.

    Returns:
        Each micro-batch that has rows, with its result. Empty on all stages but the last.
    """

    def loss(output_BTS: Tensor, micro: Micro[B]) -> tuple[Tensor, tuple[Micro[B], R] | None]:
        if micro.batch is None:
            return output_BTS[:0].float().sum(), None
        if model.tells_states:
            output_BTS = _states_of_rows(output_BTS, model)
        rows, width = micro.batch.tokens.shape
        every = output_BTS.split(len(micro.tokens_BT))
        if micro.packed is None:
            every = [each[:rows] if model.cp > 1 else each[:rows, :width] for each in every]
        value, result = reduce(every, micro, micro.batch)
        return value, (micro, result)

    rows, width = micros[0].tokens_BT.shape
    kept = run_schedule(
        model.chunks,
        micros,
        partial(_forward, model.sight, groups.context_parallel()),
        loss,
        micro_batch_size=rows,  # used only if all micro-batches have one shape
        longest=width,
        forward_only=forward_only,
    )
    return [each for each in kept if each is not None]


def _forward(
    sight: Sight | None, sharers: dist.ProcessGroup, chunk: nn.Module, micro: Micro[B]
) -> Tensor:
    """Run one stage on a micro-batch; the last stage returns its output `[B, T, S]`, of ranks that
    share rows (`sharers`) that of their own tokens.

    Patches are fetched here, so that only the first stage holds any, and those of micro-batches in
    flight.
    """
    tokens_BT, positions, pictures = micro.tokens_BT, micro.positions_BT, micro.pictures
    further: dict[str, Any] = dict(micro.arguments)
    if pictures and sight is not None:
        positions = sight.positions(micro)
        if unwrapped(chunk).pre_process:
            further["pictures"] = sight.seen(micro)
    if sharers.size() > 1:
        tokens_BT, positions = (cut(x, micro.lengths, sharers) for x in (tokens_BT, positions))
    if balances(bare := unwrapped(chunk)):
        padding_BT = micro.padding_BT
        here_BT = cut(padding_BT, micro.lengths, sharers) if sharers.size() > 1 else padding_BT
        further["padding_mask"] = padding_here(bare, here_BT)
    output: Tensor = chunk(tokens_BT, positions, None, **further)
    return output


def _states_of_rows(states_TBD: Tensor, model: MegatronModel) -> Tensor:
    """Return hidden states as `[B, T, D]`, of all tokens that tensor parallel ranks share.
    Collective."""
    if model.sequence_parallel:
        group = groups.tensor_parallel()
        states_TBD = gather_from_sequence_parallel_region(states_TBD, group=group)
    return states_TBD.transpose(0, 1)


def places(
    model: MegatronModel, micro: Micro[Any], read_N: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Find the logits (or hidden states) of tokens among those of this rank.

    Args:
        read_N: flat indices, into the rows of the micro-batch, of the tokens whose logits are
            read, on the CPU.

    Returns:
        Indices, into `read_N`, of the logits that this rank has, all without context parallelism;
        and their flat places. Both are on `device`.
    """
    assert micro.batch is not None
    width, whole = micro.batch.tokens.shape[1], sum(micro.lengths)
    if micro.packed is not None:
        read_N, width = micro.places(read_N), whole
    if model.cp == 1:
        return torch.arange(len(read_N), device=device), read_N.to(device)
    mine_M, place_M = places_here(read_N % width, micro.lengths, groups.context_parallel())
    row_M = read_N[mine_M] // width
    return mine_M.to(device), (row_M * (whole // model.cp) + place_M).to(device)


def of_all_tokens(model: MegatronModel, part_M: Tensor, mine_M: Tensor, size: int) -> Tensor:
    """Return the values of all `size` tokens, `[size, ...]`, from those of this rank. Collective.

    Args:
        mine_M: first result of `places`.
    """
    return joined(mine_M, part_M, size, groups.context_parallel()) if model.cp > 1 else part_M
