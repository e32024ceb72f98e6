"""Experts of the local layer spec that are computed with grouped matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class GroupedExperts(SequentialMLP):
    """Megatron-Core's sequential experts, computed with grouped matrix products.

    Two calls of PyTorch's grouped product replace two products for each expert. Megatron-Core's own
    grouped experts need a package for CUDA and keep all experts in one transposed parameter. Here
    every expert keeps its own parameters under the names of the sequential experts, so that tables,
    optimizer and checkpoints need no special case. The price is a stacked copy of the weights in
    each pass.
    """

    def forward(
        self, tokens_ND: Tensor, tokens_per_expert: Tensor, probs_N: Tensor
    ) -> tuple[Tensor, None]:
        """Compute the experts' outputs, weighted with the router's probabilities.

        Args:
            tokens_ND: hidden states, those of the first expert, then those of the second, and so
                on.
            tokens_per_expert: number of tokens of each expert, `[experts of this rank]`.
            probs_N: the router's probability of each row of `tokens_ND`.

        Returns:
            Outputs `[N, D]`, and None because there is no bias.
        """
        if not len(tokens_ND):
            # The base class uses all weights even without tokens, so that all get a gradient.
            found: tuple[Tensor, None] = super().forward(tokens_ND, tokens_per_expert, probs_N)
            return found
        ends_E = tokens_per_expert.to(tokens_ND.device).cumsum(0).to(torch.int32)
        first, second = (
            torch.stack([getattr(expert, name).weight for expert in self.local_experts])
            for name in ("linear_fc1", "linear_fc2")
        )
        gate, up = F.grouped_mm(tokens_ND, first.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
        scaled = self.config.activation_func(gate) * up * probs_N.unsqueeze(-1)
        return F.grouped_mm(scaled.to(tokens_ND.dtype), second.transpose(1, 2), offs=ends_E), None
