"""Rotary positions on three axes: time, height and width (mRoPE)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mcore_adapter.modeling.rope import Rope
from mcore_adapter.models.fields import Vision


class MRope(nn.Module):
    """Angles of rotary positions, where each frequency belongs to one axis.

    Angles are computed as in Hugging Face. Megatron-Core has a module of this interface, but it
    knows neither interleaved axes nor changed frequencies.
    """

    axes_F: Tensor
    inverse_frequencies_F: Tensor

    def __init__(self, rope: Rope, vision: Vision) -> None:
        super().__init__()
        frequencies = rope.inverse_frequencies
        self.register_buffer("axes_F", axes_of(vision), persistent=False)
        self.register_buffer("inverse_frequencies_F", frequencies, persistent=False)

    def forward(
        self,
        positions_3BT: Tensor,
        mrope_section: object = None,
        cp_group: object = None,
    ) -> Tensor:
        """Return the angles `[T, B, 1, head width]` for Megatron-Core's attention.

        Megatron-Core also passes the sections, which are known here, and a group for context
        parallelism, which the core attention refuses.
        """
        positions_FBT = positions_3BT[self.axes_F].float()
        angles = (positions_FBT * self.inverse_frequencies_F[:, None, None]).permute(2, 1, 0)
        return torch.cat([angles, angles], dim=-1)[:, :, None]


def axes_of(vision: Vision) -> Tensor:
    """Return the axis (0 time, 1 height, 2 width) of each rotary frequency, int64 `[F]`."""
    time, height, width = vision.sections
    if not vision.interleaved:
        return torch.tensor([0] * time + [1] * height + [2] * width)
    axes = torch.zeros(sum(vision.sections), dtype=torch.long)
    axes[1 : 3 * height : 3] = 1
    axes[2 : 3 * width : 3] = 2
    return axes
