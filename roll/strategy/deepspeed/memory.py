"""Offload of tensors to host memory and back, invisible to DeepSpeed.

DeepSpeed can offload the states of some of its optimizers only. DeepSpeed also keeps many views of
a few large buffers. Hence this module frees and restores the memory behind the buffers, and all
views stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from roll.strategy.deepspeed.shard_map import is_partitioned, padded_part


class Parking:
    """Store that moves the memory of tensors to the host and back."""

    def __init__(self) -> None:
        self._aside: list[tuple[UntypedStorage, UntypedStorage]] = []

    def put_aside(self, tensors: Iterable[Tensor]) -> None:
        """Copy the memory of the tensors to the host and free it.

        Until `take_back` the tensors and all their views have no values.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.size() == 0:  # empty, or freed already with another tensor
                continue
            self._aside.append((storage, UntypedStorage(storage.size()).copy_(storage)))
            storage.resize_(0)

    def take_back(self) -> None:
        """Allocate the memory again and restore the values."""
        for storage, copy in self._aside:
            storage.resize_(copy.size())
            storage.copy_(copy)
        self._aside.clear()


def states(
    module: nn.Module, engine: Any | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[Tensor]:
    """Yield a model's parameters, buffers, master weights, moments and gradient buffers.

    The tensors may be on any device.

    Args:
        engine: DeepSpeed's engine, or None.
        optimizer: the PyTorch optimizer in the engine; None for a frozen model.
    """
    yield from module.buffers()
    for parameter in module.parameters():
        yield parameter.detach()
        if is_partitioned(parameter):
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
    elif not hasattr(zero, "ipg_buckets"):  # DeepSpeed's bfloat16 optimizer of ZeRO-1
        yield from zero.fp32_groups_gradients_flat
    elif zero.cpu_offload:  # a gradient of the largest parameter is added up in it, on the device
        yield zero.temp_grad_buffer_for_gpu_offload
