"""RMS norm of the local layer spec."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


def normalised(x: Tensor, eps: float) -> Tensor:
    """Return `x` in fp32, divided by the root of the mean square of its last dimension."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """RMS norm as Hugging Face computes it: in fp32, and rounded to the input's dtype.

    The norm is rounded before it is scaled by the weight, or after that if the weight is centred on
    zero. Megatron-Core's own norm for the local spec refuses sequence parallelism. All that
    sequence parallelism needs is a mark on the weight, so that its gradients are summed over the
    tensor parallel ranks.
    """

    plain = False
    """True to centre the weight on one even if the model's other norms are centred on zero."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        """Make a norm over `hidden_size` dimensions; further arguments of Megatron-Core are
        ignored."""
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma and not self.plain
        start = torch.zeros if self.zero_centered else torch.ones
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, `[..., hidden]`, with its last dimension normalised and scaled, in its own
        dtype."""
        wide, weight = normalised(x, self.eps), self.factor()
        if self.zero_centered:
            return (wide * (1.0 + weight.float())).to(x.dtype)
        return weight * wide.to(x.dtype)

    def factor(self) -> Tensor:
        """Return the weight."""
        return self.weight


class PlainRMSNorm(RMSNorm):
    """RMS norm within a gated delta net; its weight is always centred on one.

    All ranks have the weight, and each normalises its own heads. So gradients are summed over the
    tensor parallel ranks also without sequence parallelism, whose mark does the same.
    """

    plain = True

    def factor(self) -> Tensor:
        """Return the weight, whose gradients are summed over ranks."""
        if self.weight.sequence_parallel:  # type: ignore[attr-defined]
            return self.weight
        summed: Tensor = copy_to_tensor_model_parallel_region(self.weight)
        return summed


class LatentNorm(RMSNorm):
    """RMS norm within latent attention; its epsilon is 1e-6, whatever that of the model is."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object
    ) -> None:
        super().__init__(config, hidden_size, 1e-6)


class WideNorm(nn.Module):
    """RMS norm over all heads of queries together, which lie on several ranks (minimax_m2)."""

    of_keys = False
    """True for the heads of keys."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        """Make the norm of this rank's heads, which are `hidden_size` wide."""
        super().__init__()
        heads = config.num_query_groups if self.of_keys else config.num_attention_heads
        self.width, self.eps = heads * hidden_size, eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        own = self.width // config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(own, dtype=config.params_dtype, device=device))
        # Without this mark the gradient norm would count the heads of one rank only.
        set_tensor_model_parallel_attributes(self.weight, True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, `[T, B, heads, width of a head]`, normalised over all heads and scaled, in
        its own dtype."""
        wide = x.float()
        own = wide.square().sum((-2, -1), keepdim=True)
        # Every rank's outputs depend on every rank's heads: the gradients are summed, too.
        total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(own))
        wide = wide * torch.rsqrt(total / self.width + self.eps)
        return self.weight.view(x.shape[-2:]) * wide.to(x.dtype)


class WideKeyNorm(WideNorm):
    """RMS norm over all heads of keys together."""

    of_keys = True
