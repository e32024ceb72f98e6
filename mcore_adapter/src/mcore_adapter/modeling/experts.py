"""Router of layers with experts, and experts that are computed with grouped matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import (
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Router(TopKRouter):
    """Megatron-Core's router, of which padding has no part in the loss that balances experts.

    Megatron-Core's own gives NaN for a micro-batch of padding alone, and fails with padding where
    experts have a bias.
    """

    def _apply_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Return the probabilities, whose gradient now has that of the balancing loss, too."""
        factor = self.get_aux_loss_coeff("aux_loss")
        if factor == 0:
            return probs
        # `routing_map` and scores are zero at padding.
        counts_E, own, total = get_tokens_per_expert_and_token_count(
            routing_map=routing_map,
            reduce_group=self.tp_cp_group,
            topk=self.topk,
            with_padding_mask=with_padding_mask,
        )
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=counts_E,
            total_num_tokens=total.clamp(min=1) if with_padding_mask else total,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=factor,
            fused=self.config.moe_router_fusion,
        )
        attached: Tensor = self.attach_and_log_load_balancing_loss(
            probs, factor, loss, "load_balancing_loss", self.tp_cp_group, valid_token_count=own
        )
        return attached

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, padding left out."""
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        super()._apply_expert_bias(routing_map)


def balances(chunk: GPTModel) -> bool:
    """Return whether a chunk is trained with the loss that balances experts."""
    factor = chunk.config.moe_aux_loss_coeff
    return bool(chunk.config.num_moe_experts) and any(
        factor if isinstance(factor, list) else [factor]
    )


def padding_here(chunk: GPTModel, padding_BT: Tensor) -> Tensor:
    """Return the argument `padding_mask` of a chunk, from True at the padding of its input
    `[B, T]`.

    With sequence parallelism each rank has a part of the tokens. Megatron-Core divides the mask
    itself only where it also divides the embeddings.
    """
    whole = not chunk.config.sequence_parallel
    if whole or (chunk.pre_process and chunk.embedding.scatter_to_sequence_parallel):
        return padding_BT
    own_TB = scatter_to_sequence_parallel_region(
        padding_BT.transpose(0, 1).contiguous(), group=chunk.pg_collection.tp
    )
    own_BT: Tensor = own_TB.transpose(0, 1).contiguous()
    return own_BT


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
