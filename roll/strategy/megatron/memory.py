"""Offload of parameters, gradients and optimizer state to host memory, and the way back."""

from __future__ import annotations

from typing import Any

import torch

from mcore_adapter.local_tensors import unwrapped
from roll.platform.cuda import free_cached
from roll.strategy.megatron.model import MegatronModel
from roll.strategy.megatron.update import Update

_CPU = torch.device("cpu")


def offload(model: MegatronModel, update: Update | None) -> None:
    """Move parameters and optimizer state to host memory.

    Gradients are dropped, as the next update computes new ones.
    """
    if update is not None:
        update.optimizer.offload_to_cpu()
        for buffer in _buffers(model):
            buffer.offload_to_cpu()
    _move(model, update, _CPU)
    _forget_angles()
    _forget_scratch()
    free_cached()


def onload(model: MegatronModel, update: Update | None, device: torch.device) -> None:
    """Move parameters and optimizer state back to `device`."""
    _move(model, update, device)
    if update is not None:
        for buffer in _buffers(model):
            buffer.reload_from_cpu()
        update.optimizer.restore_from_cpu()


def _buffers(model: MegatronModel) -> list[Any]:
    """List the model's gradient buffers.

    With a distributed optimizer they contain the trained parameters too.
    """
    return [b for chunk in model.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]


def _forget_angles() -> None:
    """Drop the rotary angles that Megatron-Core keeps on the device, of up to 32 lengths of rows,
    for all models of the process. They are made anew when they are needed."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()


def _forget_scratch() -> None:
    """Drop the tensors in which Megatron-Core gathers the tokens of sequence parallelism, which it
    keeps on the device at their largest size. Nothing reads them between two passes."""
    from megatron.core import parallel_state

    if parallel_state._GLOBAL_MEMORY_BUFFER is not None:
        parallel_state._GLOBAL_MEMORY_BUFFER.buffer.clear()


def _move(model: MegatronModel, update: Update | None, device: torch.device) -> None:
    """Move the tensors that are in no buffer to `device`.

    The tensor objects stay the same, because wrapper and optimizer hold references to them.
    """
    for chunk in model.chunks:
        inner = unwrapped(chunk)
        in_buffer = update is not None and chunk.ddp_config.use_distributed_optimizer
        # Frozen parameters (of a model with an adapter) are never in a buffer.
        lying = (p for p in inner.parameters() if not (in_buffer and p.requires_grad))
        for tensor in (*inner.buffers(), *lying):
            tensor.data = tensor.data.to(device)
