"""RMS norm of the local layer spec."""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """As Hugging Face computes it: in fp32, rounded before it is scaled.

    Megatron-Core's own for the local spec refuses sequence parallelism; all that is asks for is the
    mark on the weight, by which gradients are summed over the tensor parallel ranks.
    """

    plain = False
    """Centred on one even where the model's other norms are centred on zero."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma and not self.plain
        start = torch.zeros if self.zero_centered else torch.ones
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class PlainRMSNorm(RMSNorm):
    """The norm within a gated delta net."""

    plain = True
