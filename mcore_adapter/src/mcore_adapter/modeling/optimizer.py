"""Adam over the chunks of a model, and one step of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32


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
        weight_decay: pulls weights to zero; not biases and norms, where that only hurts.
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
    optimizer = get_megatron_optimizer(config, list(chunks), use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron-Core leaves this factor to its own scheduler of learning rates.
        group["weight_decay"] *= group["wd_mult"]
        group["fused"] = True
    for each in parts_of(optimizer):
        # The norm leaves out what other tensor parallel ranks count; of experts those are others.
        if each.param_groups and each.param_groups[0]["is_expert_parallel"]:
            each.tp_group = parallel_state.get_expert_tensor_parallel_group()
    return optimizer


def parts_of(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """The optimizers of dense parameters and of experts, which are cut over other ranks."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


@dataclass(frozen=True)
class Step:
    """What a step did."""

    grad_norm: float
    """Of all parameters, before it was scaled down."""
    skipped: bool
    """The norm was zero or not finite, and weights and states stayed as they were."""


@torch.no_grad()
def step(
    optimizer: MegatronOptimizer,
    chunks: Sequence[DistributedDataParallel],
    *,
    lr: float | None = None,
) -> Step:
    """Update the weights with the gradients of the last schedule, then forget the gradients.

    A gradient that is not finite changes nothing, and neither does one of zero: Adam would go on
    in its old direction. A collective: all ranks call it.

    Args:
        lr: from now on; None: as it was.
    """
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    skipped = not 0 < norm < math.inf
    if not skipped:
        if optimizer.config.clip_grad > 0:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            clip_grad_by_total_norm_fp32(parameters, optimizer.config.clip_grad, norm)
        optimizer.step_with_ready_grads()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    return Step(norm, skipped)
