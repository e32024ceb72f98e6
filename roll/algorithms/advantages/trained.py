"""Trained tokens side by side, for estimators that walk from one token to the next.

Only trained tokens are steps: what an environment writes between two turns of the policy is part
of the state, not an action. Whatever stands at the other positions, NaN included, is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Moves `[B, T]` to `[B, L]` and back; L is the most trained tokens of any row.

    Example: mask [[0, 1, 0, 1], [0, 1, 0, 0]]: [[5, 6, 7, 8], [1, 2, 3, 4]] packs to
        [[6, 8], [2, 0]], and that unpacks to [[0, 6, 0, 8], [0, 2, 0, 0]]
    """

    slot_BT: Tensor
    """Int64; 1 for a row's first trained token, 2 for its second, 0 for what is not trained: a
    slot that is written but never read by `pack`, and that holds 0 in `unpack`."""
    count_B: Tensor
    """Int64; trained tokens of each row."""
    width: int
    """L, at least 1."""

    @classmethod
    def of(cls, mask_BT: Tensor) -> TrainedTokens:
        """`mask_BT`: bool, True where a token is trained."""
        up_to_BT = mask_BT.cumsum(1)
        count_B = up_to_BT[:, -1].clone()
        return cls(up_to_BT.mul_(mask_BT), count_B, max(int(count_B.max()), 1))

    def pack(self, values_BT: Tensor) -> Tensor:
        """`[B, L]`, zero after a row's last trained token."""
        slots_BL = values_BT.new_zeros(len(values_BT), 1 + self.width)
        return slots_BL.scatter_(1, self.slot_BT, values_BT)[:, 1:]

    def at_last(self, values_B: Tensor) -> Tensor:
        """`[B, L]`: each row's value on its last trained token, zero elsewhere."""
        slots_BL = values_B.new_zeros(len(values_B), 1 + self.width)
        return slots_BL.scatter_(1, self.count_B[:, None], values_B[:, None])[:, 1:]

    def unpack(self, values_BL: Tensor, dtype: torch.dtype) -> Tensor:
        """`[B, T]`, zero outside the mask."""
        slots_BL = values_BL.new_zeros(len(values_BL), 1 + self.width, dtype=dtype)
        slots_BL[:, 1:] = values_BL
        return slots_BL.gather(1, self.slot_BT)
