"""Adam over the chunks of a model, and one step of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer


def adam(
    chunks: Sequence[DistributedDataParallel],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
) -> MegatronOptimizer:
    """AdamW in fp32, over fp32 copies of weights that are not.

    Its states are cut over the data parallel ranks if `data_parallel` was told so.

    Args:
        chunks: wrapped by `data_parallel`.
        weight_decay: not of biases and norms, as Megatron-Core has it.
        max_grad_norm: gradients are scaled down to it; 0: never.
    """
    model = chunks[0].config
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        min_lr=lr,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_eps=eps,
        weight_decay=weight_decay,
        clip_grad=max_grad_norm,
        params_dtype=model.params_dtype,
        bf16=model.bf16,
        fp16=False,
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
    )
    return get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)


@dataclass(frozen=True)
class Step:
    """What a step did."""

    grad_norm: float
    """Of all parameters, before it was scaled down."""
    skipped: bool
    """The norm was not finite, and weights and states stayed as they were."""


def step(optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]) -> Step:
    """Update the weights with the gradients of the last schedule, then forget the gradients.

    A collective: all ranks call it.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    skipped = not math.isfinite(norm)
    if not skipped:
        optimizer.step()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    return Step(norm, skipped)
