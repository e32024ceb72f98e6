"""Off the device and back: parameters, gradients and optimizer state."""

from __future__ import annotations

import torch

from mcore_adapter.held import unwrapped
from roll.strategy.megatron.model import MegatronModel
from roll.strategy.megatron.update import Update

_CPU = torch.device("cpu")


def offload(model: MegatronModel, update: Update | None) -> None:
    """To host memory; gradients, which the next update makes anew, are dropped."""
    _move(model, update, _CPU)
    if update is not None:
        for chunk in model.chunks:
            chunk.offload_grad_buffers()
    torch.cuda.empty_cache()


def onload(model: MegatronModel, update: Update | None, device: torch.device) -> None:
    _move(model, update, device)
    if update is not None:
        for chunk in model.chunks:
            chunk.restore_grad_buffers()


def _move(model: MegatronModel, update: Update | None, device: torch.device) -> None:
    """In place, because the data parallel wrapper and the optimizer know the objects."""
    for chunk in model.chunks:
        inner = unwrapped(chunk)
        for tensor in (*inner.parameters(), *inner.buffers()):
            tensor.data = tensor.data.to(device)
    if update is None:
        return
    for weight in update.weights:
        weight.master.data = weight.master.data.to(device)
    for values in update.optimizer.state.values():
        for name, value in values.items():
            values[name] = value.to(device)
