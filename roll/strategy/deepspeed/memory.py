"""Off the device and back, without DeepSpeed's noticing.

DeepSpeed moves the states of some of its optimizers, and of others not. It keeps many views of
few large buffers; so the memory behind them is given up and taken back, and all views stay as
they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn


class Parking:
    """Puts the memory of tensors aside, to host memory, and back."""

    def __init__(self) -> None:
        self._aside: list[tuple[UntypedStorage, UntypedStorage]] = []

    def put_aside(self, tensors: Iterator[Tensor]) -> None:
        """Free what these tensors lie in; they have no values until `take_back`."""
        seen = {storage.data_ptr() for storage, _ in self._aside}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.size() == 0 or storage.data_ptr() in seen:
                continue
            copy = UntypedStorage(storage.size()).copy_(storage)
            self._aside.append((storage, copy))
            storage.resize_(0)

    def take_back(self) -> None:
        for storage, copy in self._aside:
            storage.resize_(copy.size())
            storage.copy_(copy)
        self._aside.clear()


def held(
    module: nn.Module, engine: Any | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[Tensor]:
    """What of a model and its states lies on the device.

    Args:
        engine: DeepSpeed's, if there is one.
        optimizer: None for a frozen model.
    """
    for tensor in _all(module, engine, optimizer):
        if tensor.device.type != "cpu":
            yield tensor


def _all(
    module: nn.Module, engine: Any | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[Tensor]:
    yield from module.buffers()
    for parameter in module.parameters():
        yield parameter.detach()
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor.detach()
    if engine is None or optimizer is None:
        return
    for flat, state in optimizer.state.items():
        yield flat.detach()
        yield from state.values()
    zero = engine.optimizer
    for name in ("fp32_groups_gradients_flat", "grad_partitions_flat_buffer"):
        buffers = getattr(zero, name, [])
        yield from [buffers] if isinstance(buffers, Tensor) else buffers
    for bucket in getattr(zero, "ipg_buckets", {}).values():
        buffers = bucket.buffer
        yield from [buffers] if isinstance(buffers, Tensor) else buffers or ()
