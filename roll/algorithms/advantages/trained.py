"""Packing of trained tokens side by side, for estimators that go from one token to the next.

Only trained tokens are steps: text that an environment writes between two turns of the policy is
part of the state, not an action. Values at other positions, NaN included, are never used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms.masking import only


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Conversion between `[B, T]` and `[B, L]`, where trained tokens have no gaps between them.

    If a row has several turns, the trained tokens of each row move to the left, and L is the
    largest number of trained tokens in a row. If no row has a gap, as in a batch of single answers,
    all tokens keep their positions and L is T: moving them would take longer than the computation.

    Example: with mask [[0, 1, 0, 1], [0, 1, 0, 0]], [[5, 6, 7, 8], [1, 2, 3, 4]] packs to
        [[6, 8], [2, 0]], which unpacks to [[0, 6, 0, 8], [0, 2, 0, 0]]
    """

    mask_BT: Tensor
    """Loss mask, bool; True where a token is trained."""
    count_B: Tensor
    """Number of trained tokens of each row, int64."""
    last_B: Tensor
    """Position on axis L of each row's last trained token, int64; meaningless for a row without
    trained tokens."""
    slot_BT: Tensor | None
    """Slot of each token, int64: 1 for the first trained token of a row, 2 for the second, 0 for a
    token that is not trained. `pack` writes slot 0 but drops it; in `unpack` it holds 0. None if
    all tokens keep their positions."""

    @classmethod
    def of(cls, mask_BT: Tensor) -> TrainedTokens:
        """Build the conversion from a loss mask, bool `[B, T]`, True where a token is trained."""
        count_B, first_B = mask_BT.sum(1), torch.zeros_like(mask_BT[:, 0], dtype=torch.int64)
        row_S, before_S = (mask_BT[:, 1:] > mask_BT[:, :-1]).nonzero(as_tuple=True)
        first_B[row_S] = before_S + 1
        runs_B = mask_BT[:, 0] + torch.bincount(row_S, minlength=len(mask_BT))
        if bool((runs_B > 1).any()):
            return cls(mask_BT, count_B, count_B - 1, mask_BT.cumsum(1).mul_(mask_BT))
        return cls(mask_BT, count_B, first_B + count_B - 1, None)

    @classmethod
    def counted(cls, mask_BT: Tensor) -> TrainedTokens:
        """Build the conversion in which the n-th trained token of every row has the same place on
        axis L, also where prompts differ in length."""
        count_B = mask_BT.sum(1)
        return cls(mask_BT, count_B, count_B - 1, mask_BT.cumsum(1).mul_(mask_BT))

    def some(self, rows_R: Tensor, width: int) -> TrainedTokens:
        """Return the conversion for the rows `rows_R`, which are at most `width` tokens long."""
        return TrainedTokens(
            self.mask_BT[:, :width].index_select(0, rows_R),
            self.count_B[rows_R],
            self.last_B[rows_R],
            None if self.slot_BT is None else self.slot_BT[:, :width].index_select(0, rows_R),
        )

    def pack(self, values_BT: Tensor) -> Tensor:
        """Pack values `[B, T]` into float64 `[B, L]`, zero at positions without a trained token."""
        if self.slot_BT is None:
            return only(values_BT, self.mask_BT).double()
        rows, width = len(values_BT), int(self.count_B.max())
        slots_BL = torch.zeros(rows, 1 + width, dtype=torch.float64, device=values_BT.device)
        return slots_BL.scatter_(1, self.slot_BT, values_BT.double())[:, 1:]

    def add_at_last(self, values_BL: Tensor, amounts_B: Tensor) -> None:
        """Add `amounts_B` to each row's last trained token, in place; skip rows without one."""
        rows_R = self.count_B.nonzero(as_tuple=True)[0]
        values_BL[rows_R, self.last_B[rows_R]] += amounts_B[rows_R].to(values_BL.dtype)

    def unpack(self, values_BL: Tensor) -> Tensor:
        """Move packed values `[B, L]` back to `[B, T]`, zero outside the mask."""
        if self.slot_BT is None:
            return only(values_BL, self.mask_BT)
        return pad(values_BL, [1, 0]).gather(1, self.slot_BT)
