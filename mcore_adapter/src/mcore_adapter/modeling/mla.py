"""Latent attention of the local layer spec."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn


class LatentAttention(MLASelfAttention):
    """Megatron-Core's, with the gradient of the keys' rotated part summed over the ranks.

    All heads share that part. With a column parallel down projection Megatron-Core 0.16.1 gathers
    it from the tensor parallel ranks and, on the way back, drops what the heads of other ranks
    found; with a duplicated one it does not. So the output is made to look like the latter's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.tensor_model_parallel_size > 1:
            self.linear_kv_down_proj.register_forward_hook(_like_duplicated)


def _like_duplicated(
    module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """[T, B, width / tp] of all tokens -> [T / tp, B, width] of this rank's tokens."""
    whole = gather_from_tensor_model_parallel_region(output[0])
    return scatter_to_sequence_parallel_region(whole), output[1]
