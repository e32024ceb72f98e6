"""Adam for the chunks of a model, and one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor


def adam(
    chunks: Sequence[DistributedDataParallel],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
) -> MegatronOptimizer:
    """Make an AdamW optimizer that computes in fp32, with fp32 copies of weights in other dtypes.

    The optimizer states are divided over the data parallel ranks if `data_parallel` was called with
    `distributed_optimizer`.

    Args:
        weight_decay: strength with which weights other than biases and norms are pulled to zero.
        max_grad_norm: largest gradient norm; larger gradients are scaled down to it; 0: no limit.
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
        # Megatron-Core applies this factor only in its own scheduler of learning rates.
        group["weight_decay"] *= group["wd_mult"]
        group["fused"] = True
    _set_ranks_of_experts(optimizer)
    return optimizer


def _set_ranks_of_experts(optimizer: MegatronOptimizer) -> None:
    """Give the optimizer of experts their tensor parallel ranks, which differ from the others'.

    The gradient norm counts a parameter that several of these ranks hold only once.
    """
    for each in parts_of(optimizer):
        if each.param_groups and each.param_groups[0]["is_expert_parallel"]:
            each.tp_group = parallel_state.get_expert_tensor_parallel_group()


def parts_of(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    """Return the optimizers of which `optimizer` consists.

    There is one for dense parameters and one for experts, because experts are divided over other
    ranks. An optimizer that is not chained is returned alone.
    """
    return getattr(optimizer, "chained_optimizers", [optimizer])


@dataclass(frozen=True)
class Step:
    """Result of one optimizer step."""

    grad_norm: float
    """Norm of the gradients of all parameters but those apart, before they were scaled down."""
    skipped: bool
    """True if the norm was zero or not finite: weights and optimizer states did not change."""


@torch.no_grad()
def step(
    optimizer: MegatronOptimizer,
    chunks: Sequence[DistributedDataParallel],
    *,
    lr: float | None = None,
    apart: Sequence[Tensor] | None = None,
) -> Step:
    """Update the weights with the gradients of the last schedule, then clear the gradients.

    Nothing is updated if the gradient norm is not finite or is zero: with zero gradients, Adam
    would go on in its old direction. A collective: all ranks call it.

    Args:
        lr: learning rate from now on; None: unchanged.
        apart: those tensors of this rank that the optimizer updates and whose gradients are scaled
            down by a norm of their own, so that the others are updated as without them; None: there
            are none on any rank.
    """
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
    optimizer.prepare_grads()
    every = [p for group in optimizer.param_groups for p in group["params"]]
    own = {id(tensor) for tensor in apart or ()}
    others, mine = ([p for p in every if (id(p) in own) is which] for which in (False, True))
    norm = _norm_without(optimizer, mine)
    parts = [(others, norm)]
    if apart is not None:
        parts.append((mine, _norm_without(optimizer, others)))
    skipped = not 0 < norm < math.inf or not all(math.isfinite(each) for _, each in parts)
    if not skipped:
        if optimizer.config.clip_grad > 0:
            for parameters, of_part in parts:
                clip_grad_by_total_norm_fp32(parameters, optimizer.config.clip_grad, of_part)
        optimizer.step_with_ready_grads()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    return Step(norm, skipped)


def _norm_without(optimizer: MegatronOptimizer, left_out: Sequence[Tensor]) -> float:
    """Return the norm of the gradients of all parameters but those left out. A collective."""
    kept = [tensor.grad for tensor in left_out]
    for tensor in left_out:
        tensor.grad = None
    norm = float(optimizer.get_grad_norm())
    for tensor, grad in zip(left_out, kept, strict=True):
        tensor.grad = grad
    return norm
