"""Multi-head latent attention of the local layer spec."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn


class LatentAttention(MLASelfAttention):
    """Megatron-Core's latent attention, with correct gradients for the rotated part of the keys.

    All heads share that part, so its gradients must be summed over the tensor parallel ranks. With
    a column parallel down projection, Megatron-Core 0.16.1 gathers the part from these ranks and,
    in the backward pass, drops the gradients from the heads of other ranks. With a down projection
    that is duplicated on all ranks, it sums the gradients. Therefore a hook gives the output the
    shape that a duplicated projection's output has.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(_like_duplicated)


def _like_duplicated(
    module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Turn `[T, B, width / tp]` of all tokens into `[T / tp, B, width]` of this rank's tokens."""
    whole = gather_from_tensor_model_parallel_region(output[0])
    return scatter_to_sequence_parallel_region(whole), output[1]
