"""Off the device and back, without DeepSpeed's noticing.

DeepSpeed moves the states of some of its optimizers, and of others not. It keeps many views of
few large buffers; so the memory behind them is given up and taken back, and all views stay as
they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from roll.strategy.deepspeed.shard_map import is_cut, padded_part


class Parking:
    """Puts what tensors lie in aside, to host memory, and back."""

    def __init__(self) -> None:
        self._aside: list[tuple[UntypedStorage, UntypedStorage]] = []

    def put_aside(self, tensors: Iterable[Tensor]) -> None:
        """Until `take_back` the tensors, and all views of them, have no values."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.size() == 0:  # nothing in it, or put aside with another tensor
                continue
            self._aside.append((storage, UntypedStorage(storage.size()).copy_(storage)))
            storage.resize_(0)

    def take_back(self) -> None:
        for storage, copy in self._aside:
            storage.resize_(copy.size())
            storage.copy_(copy)
        self._aside.clear()


def states(
    module: nn.Module, engine: Any | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[Tensor]:
    """A model's parameters, buffers, masters, moments, and buffers of gradients, wherever they lie.

    Args:
        engine: DeepSpeed's, if there is one.
        optimizer: None for a frozen model.
    """
    yield from module.buffers()
    for parameter in module.parameters():
        yield parameter.detach()
        if is_cut(parameter):
            yield padded_part(parameter)
    if engine is None or optimizer is None:
        return
    for flat, state in optimizer.state.items():
        yield flat.detach()
        yield from state.values()
    zero = engine.optimizer
    if zero is optimizer:
        return
    if engine.zero_optimization_stage() == 3:
        yield zero.grad_partitions_flat_buffer
        yield from (b.buffer for b in zero.ipg_buckets.values() if isinstance(b.buffer, Tensor))
    elif not hasattr(zero, "ipg_buckets"):  # DeepSpeed's optimizer of ZeRO-1 in bfloat16
        yield from zero.fp32_groups_gradients_flat
