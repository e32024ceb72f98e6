"""Trained tokens side by side, for estimators that walk from one token to the next.

Only trained tokens are steps: what an environment writes between two turns of the policy is part
of the state, not an action. Whatever stands at the other positions, NaN included, is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from roll.algorithms.masking import only


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """Moves `[B, T]` to `[B, L]`, where nothing stands between a row's trained tokens, and back.

    With several turns in a row each row moves to the left, and L is the most trained tokens of any
    row. Where no row has a gap, which is every batch of single answers, all tokens stay where they
    are and L is T: moving them would take longer than what is computed from them.

    Example: mask [[0, 1, 0, 1], [0, 1, 0, 0]]: [[5, 6, 7, 8], [1, 2, 3, 4]] packs to
        [[6, 8], [2, 0]], and that unpacks to [[0, 6, 0, 8], [0, 2, 0, 0]]
    """

    mask_BT: Tensor
    """Bool; True where a token is trained."""
    count_B: Tensor
    """Int64; trained tokens of each row."""
    last_B: Tensor
    """Int64; where in L each row's last trained token stands; of no meaning in a row without."""
    slot_BT: Tensor | None
    """Int64; 1 for a row's first trained token, 2 for its second, 0 for what is not trained: a
    slot that is written but never read by `pack`, and that holds 0 in `unpack`. None where all
    tokens stay where they are."""

    @classmethod
    def of(cls, mask_BT: Tensor) -> TrainedTokens:
        """`mask_BT`: bool, True where a token is trained."""
        count_B, first_B = mask_BT.sum(1), torch.zeros_like(mask_BT[:, 0], dtype=torch.int64)
        row_S, before_S = (mask_BT[:, 1:] > mask_BT[:, :-1]).nonzero(as_tuple=True)
        first_B[row_S] = before_S + 1
        runs_B = mask_BT[:, 0] + torch.bincount(row_S, minlength=len(mask_BT))
        if bool((runs_B > 1).any()):
            return cls(mask_BT, count_B, count_B - 1, mask_BT.cumsum(1).mul_(mask_BT))
        return cls(mask_BT, count_B, first_B + count_B - 1, None)

    def some(self, rows_R: Tensor, width: int) -> TrainedTokens:
        """Those of some rows, which are at most `width` long."""
        return TrainedTokens(
            self.mask_BT[:, :width].index_select(0, rows_R),
            self.count_B[rows_R],
            self.last_B[rows_R],
            None if self.slot_BT is None else self.slot_BT[:, :width].index_select(0, rows_R),
        )

    def pack(self, values_BT: Tensor) -> Tensor:
        """Float64 `[B, L]`, zero where no trained token stands."""
        if self.slot_BT is None:
            return only(values_BT, self.mask_BT).double()
        rows, width = len(values_BT), int(self.count_B.max())
        slots_BL = torch.zeros(rows, 1 + width, dtype=torch.float64, device=values_BT.device)
        return slots_BL.scatter_(1, self.slot_BT, values_BT.double())[:, 1:]

    def add_at_last(self, values_BL: Tensor, amounts_B: Tensor) -> None:
        """In place: `amounts_B` more on each row's last trained token, nothing on a row without."""
        rows_R = self.count_B.nonzero(as_tuple=True)[0]
        values_BL[rows_R, self.last_B[rows_R]] += amounts_B[rows_R].to(values_BL.dtype)

    def unpack(self, values_BL: Tensor) -> Tensor:
        """`[B, T]`, zero outside the mask."""
        if self.slot_BT is None:
            return only(values_BL, self.mask_BT)
        return pad(values_BL, [1, 0]).gather(1, self.slot_BT)
