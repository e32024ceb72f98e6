"""RMS norms of vLLM without a GPU, by its compiled kernels.

In eager mode vLLM computes a norm with six operations of PyTorch, although its build for CPUs has
kernels: it takes kernels on GPUs only. They need half to an eighth of the time
(benchmarks/norm_kernels.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "roll_cpu"
"""Name of the kernels in vLLM's lists of implementations."""


class NormKernels:
    """Part of `RollWorker` that chooses the kernels of norms."""

    def roll_use_norm_kernels(self) -> None:
        """Let norms in float32 use the kernels of vLLM's build for CPUs.

        Norms in bfloat16 stay as they are: the kernels round once, transformers rounds before the
        weight is multiplied as well. A priority that the user has set with `engine_args` stays.
        """
        from vllm import ir

        norm, added = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
        if PROVIDER not in norm.impls:  # no process may register it twice
            norm.register_impl(PROVIDER, supports_args=_norms)(_rms_norm)
            added.register_impl(PROVIDER, supports_args=_adds_and_norms, inplace=True)(
                _fused_add_rms_norm
            )
        for op in (norm, added):
            if op.get_priority() == ["native"]:  # vLLM's own choice for CPUs
                op.set_default([PROVIDER, "native"])


def _norms(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Return whether the kernel computes this norm: in float32, with a weight, over all of a
    row."""
    if weight is None or variance_size is not None:
        return False
    return x.dtype == weight.dtype == torch.float32


def _rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """Return the norm of each row of `x`, as vLLM's operation `rms_norm`."""
    x = x.contiguous()  # heads of queries are views
    normed = torch.empty_like(x)
    torch.ops._C.rms_norm(normed, x, weight, epsilon)
    return normed


def _adds_and_norms(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """Return whether the kernel computes this sum and norm, which it writes into its inputs."""
    whole = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return whole and _norms(x, weight, epsilon, variance_size)


def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of each row of `x + x_residual`, and this sum, as vLLM's operation
    `fused_add_rms_norm`; both are written into the inputs."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
