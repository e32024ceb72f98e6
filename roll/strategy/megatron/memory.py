"""Off the device and back: parameters, gradients and optimizer state."""

from __future__ import annotations

from typing import Any

import torch

from mcore_adapter.local_tensors import unwrapped
from roll.strategy.megatron.model import MegatronModel
from roll.strategy.megatron.update import Update

_CPU = torch.device("cpu")


def offload(model: MegatronModel, update: Update | None) -> None:
    """To host memory; gradients, which the next update makes anew, are dropped."""
    if update is not None:
        update.optimizer.offload_to_cpu()
        for buffer in _buffers(model):
            buffer.offload_to_cpu()
    _move(model, update, _CPU)
    torch.cuda.empty_cache()


def onload(model: MegatronModel, update: Update | None, device: torch.device) -> None:
    _move(model, update, device)
    if update is not None:
        for buffer in _buffers(model):
            buffer.reload_from_cpu()
        update.optimizer.restore_from_cpu()


def _buffers(model: MegatronModel) -> list[Any]:
    """Of gradients; with a distributed optimizer of parameters too."""
    return [b for chunk in model.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]


def _move(model: MegatronModel, update: Update | None, device: torch.device) -> None:
    """What is in no buffer; in place, because wrapper and optimizer know the objects."""
    for chunk in model.chunks:
        inner = unwrapped(chunk)
        in_buffer = update is not None and chunk.ddp_config.use_distributed_optimizer
        # Frozen parameters, those beside an adapter, are in no buffer in any case.
        lying = (p for p in inner.parameters() if not (in_buffer and p.requires_grad))
        for tensor in (*inner.buffers(), *lying):
            tensor.data = tensor.data.to(device)
