"""Micro-batches of a step: all of one shape, and the same number on each data parallel rank.

Each rank plans the micro-batches of all ranks, from lengths that all ranks know. Thus no
communication is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_adapter.parallel.packing import pack
from mcore_adapter.train.data.dataset import Dataset


@dataclass(frozen=True)
class Plan:
    """Division of the examples of a step into micro-batches, and the shape of the micro-batches."""

    parts: list[list[int]]
    """Examples of each micro-batch of all ranks, as indices in the list of the step's examples. A
    micro-batch may be empty."""
    rows: int
    """Number of rows of each micro-batch."""
    width: int
    """Number of tokens of each row."""


@dataclass(frozen=True)
class Micro:
    """Micro-batch of a rank. B: rows, T: tokens of a row, N: trained tokens."""

    tokens_BT: Tensor
    """Tokens with padding, int64 `[B, T]`."""
    positions_BT: Tensor
    """Position of each token in its sequence, counted from 0, int64 `[B, T]`."""
    packed: PackedSeqParams | None
    """Bounds of the sequences in the packed row; None: not packed, one sequence per row."""
    sequences: list[int]
    """Numbers of the sequences in the dataset."""
    places_N: Tensor
    """Index of each trained token in the flattened micro-batch, int64 `[N]`."""
    sequence_N: Tensor
    """Index in `sequences` of the sequence of each trained token, int64 `[N]`."""


def plan(
    lengths: Sequence[tuple[int, ...]],
    *,
    capacity: int,
    packing: bool,
    width_multiple: int,
    count_multiple: int,
) -> Plan:
    """Divide the examples of a step into micro-batches.

    Args:
        lengths: for each example, at least one, the numbers of tokens of its sequences. The
            sequences of an example stay together.
        capacity: largest number of tokens of a micro-batch, padding included. No example may have
            more with its padding.
        packing: True: one row with all sequences; False: one row for each sequence.
        width_multiple: the width of rows is rounded up to a multiple of this number.
        count_multiple: the number of micro-batches is a multiple of this number.

    Raises:
        ValueError: with packing, an example is longer than the rows can be. Without packing this is
            not checked.
    """
    if packing:
        loads = [sum(each) for each in lengths]
        parts = balanced(loads, capacity // width_multiple * width_multiple, count_multiple)
        widest = max(sum(loads[i] for i in part) for part in parts)
        return Plan(parts, 1, round_up(widest, width_multiple))
    width = round_up(max(max(each) for each in lengths), width_multiple)
    fit = max(1, capacity // (width * len(lengths[0])))
    parts = balanced([1] * len(lengths), fit, count_multiple)
    return Plan(parts, max(map(len, parts)) * len(lengths[0]), width)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def balanced(loads: Sequence[int], capacity: int, multiple: int) -> list[list[int]]:
    """Divide loads into as few evenly filled parts as possible with a greedy method.

    The method goes from the largest load to the smallest, and adds each load to the part that has
    the least so far.

    Args:
        loads: size of each load; at least one.
        capacity: largest sum of the loads of a part. No load may be larger.
        multiple: the number of parts is a multiple of this number.

    Returns:
        For each part the indices of its loads.

    Raises:
        ValueError: a load is larger than `capacity`.
    """
    if max(loads) > capacity:
        raise ValueError(f"a load of {max(loads)} is above the capacity of {capacity}")
    count = -(-sum(loads) // (capacity * multiple)) * multiple
    order = sorted(range(len(loads)), key=lambda i: (-loads[i], i))
    while True:
        parts: list[list[int]] = [[] for _ in range(count)]
        filled = [(0, number) for number in range(count)]
        for i in order:
            load, number = heapq.heappop(filled)
            parts[number].append(i)
            heapq.heappush(filled, (load + loads[i], number))
        if max(filled)[0] <= capacity:
            return parts
        count += multiple


def micro(
    dataset: Dataset, examples: Sequence[int], shape: Plan, *, packing: bool, device: torch.device
) -> Micro:
    """Build the micro-batch of the given examples, in the shape that the step's plan requires.

    Args:
        examples: numbers of the examples in the dataset; may be empty.
        shape: plan of the step.
        packing: True: one row with all sequences; False: one row for each sequence.
    """
    numbers = [number for example in examples for number in dataset.sequences_of(example)]
    sequences = [dataset.sequence(number) for number in numbers]
    tokens = [each[0].to(device) for each in sequences]
    none = torch.zeros(0, dtype=torch.long)
    if packing:
        # An empty micro-batch becomes a row of padding, as all ranks must run the same number.
        packed = pack(tokens or [none.new_zeros(1, device=device)], length=shape.width)
        tokens_BT, positions_BT, params = packed.tokens_BT, packed.positions_BT, packed.params
        starts = torch.tensor([0, *map(len, tokens)]).cumsum(0)[:-1].tolist()
    else:
        tokens_BT, positions_BT = _one_per_row(tokens, shape, device)
        params, starts = None, [row * shape.width for row in range(len(tokens))]
    trained = [marks.nonzero()[:, 0] for _, marks in sequences]
    places = [start + each for start, each in zip(starts, trained, strict=True)]
    owners = [torch.full_like(each, number) for number, each in enumerate(places)]
    return Micro(
        tokens_BT=tokens_BT,
        positions_BT=positions_BT,
        packed=params,
        sequences=numbers,
        places_N=torch.cat([none, *places]).to(device),
        sequence_N=torch.cat([none, *owners]).to(device),
    )


def _one_per_row(
    sequences: Sequence[Tensor], shape: Plan, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return tokens and positions of sequences, one per row and then padding, int64 `[B, T]`."""
    tokens_BT = torch.zeros(shape.rows, shape.width, dtype=torch.long, device=device)
    for row, sequence in zip(tokens_BT, sequences, strict=False):
        row[: len(sequence)] = sequence
    return tokens_BT, torch.arange(shape.width, device=device).expand_as(tokens_BT)
