"""Examples of a step in micro-batches of one shape, as many on every data parallel rank.

Every rank plans for all, from lengths that all know, and so nobody has to ask.
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
    parts: list[list[int]]
    """Places in the step of the examples of each micro-batch, of all ranks; may be empty."""
    rows: int
    width: int


@dataclass(frozen=True)
class Micro:
    """One micro-batch of a rank."""

    tokens_BT: Tensor
    positions_BT: Tensor
    packed: PackedSeqParams | None
    sequences: list[int]
    """Numbers in the dataset."""
    places_N: Tensor
    """Of the tokens that are trained on, in the flattened micro-batch."""
    sequence_N: Tensor
    """Which of `sequences` each of them belongs to."""


def plan(
    lengths: Sequence[tuple[int, ...]],
    *,
    capacity: int,
    packing: bool,
    width_multiple: int,
    count_multiple: int,
) -> Plan:
    """
    Args:
        lengths: of the sequences of each example, which stay together.
        capacity: tokens of a micro-batch; no example has more.
        packing: one row of many sequences; otherwise one sequence a row.
        width_multiple: what the width of rows is rounded up to.
        count_multiple: what the number of micro-batches divides by.
    """
    if packing:
        loads = [sum(each) for each in lengths]
        parts = balanced(loads, capacity, count_multiple)
        widest, rows = max(sum(loads[i] for i in part) for part in parts), 1
    else:
        widest = max(max(each) for each in lengths)
        fit = max(1, capacity // (widest * len(lengths[0])))
        parts = balanced([1] * len(lengths), fit, count_multiple)
        rows = max(map(len, parts)) * len(lengths[0])
    return Plan(parts, rows, -(-widest // width_multiple) * width_multiple)


def balanced(loads: Sequence[int], capacity: int, multiple: int) -> list[list[int]]:
    """Numbers of the loads in as few parts as hold them, evenly filled: the largest first, each to
    the part with the least.

    Args:
        multiple: what the number of parts divides by.
    """
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
    dataset: Dataset,
    examples: Sequence[int],
    shape: Plan,
    *,
    packing: bool,
    device: torch.device,
) -> Micro:
    """The given examples in the shape of their step."""
    numbers = [number for example in examples for number in dataset.sequences_of(example)]
    sequences = [dataset.sequence(number) for number in numbers]
    tokens = [each[0].to(device) for each in sequences]
    none = torch.zeros(0, dtype=torch.long)
    if packing:
        # A rank without examples keeps the others company with a row of padding.
        packed = pack(tokens or [none.new_zeros(1, device=device)], length=shape.width)
        tokens_BT, positions_BT, params = packed.tokens_BT, packed.positions_BT, packed.params
        starts = torch.tensor([0, *map(len, tokens)]).cumsum(0)[:-1].tolist()
    else:
        tokens_BT = none.new_zeros(shape.rows, shape.width, device=device)
        for row, each in zip(tokens_BT, tokens, strict=False):
            row[: len(each)] = each
        positions_BT = torch.arange(shape.width, device=device).expand_as(tokens_BT)
        params = None
        starts = [row * shape.width for row in range(len(tokens))]
    places = [
        start + trained.nonzero()[:, 0]
        for start, (_, trained) in zip(starts, sequences, strict=True)
    ]
    owners = [torch.full_like(each, number) for number, each in enumerate(places)]
    return Micro(
        tokens_BT=tokens_BT,
        positions_BT=positions_BT,
        packed=params,
        sequences=numbers,
        places_N=torch.cat([none, *places]).to(device),
        sequence_N=torch.cat([none, *owners]).to(device),
    )
