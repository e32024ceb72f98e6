"""Outputs of teachers (hidden states or top-k log-probabilities), as sent to the students."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The complete last layer of a language model. It computes the logits
    `(hidden @ weight^T + bias) / divisor`, of which the product is capped first if there is a `cap`
    (`roll.algorithms.logprobs.soft_cap`)."""

    weight_VD: Tensor
    bias_V: Tensor | None
    divisor: float
    cap: float | None = None
    num_tokens: int | None = None
    """Number of tokens of the teacher's tokenizer: further logits are meaningless. None: that of
    the student's."""
    _moved: dict[tuple[torch.device, range], OutputHead] = field(
        default_factory=dict, repr=False, compare=False
    )

    def drop_copies(self) -> None:
        """Drop the copies that `on` has made, to free device memory."""
        self._moved.clear()

    def on(self, device: torch.device, columns: slice = slice(None)) -> OutputHead:
        """Return a copy of this head on `device`. The copy is kept for later calls, until
        `drop_copies`.

        Args:
            columns: ids of the tokens whose logits the copy makes; all if left out.
        """
        key = device, range(len(self.weight_VD))[columns]
        if key not in self._moved:
            bias_V = None if self.bias_V is None else self.bias_V[columns].to(device)
            self._moved[key] = OutputHead(
                self.weight_VD[columns].to(device), bias_V, self.divisor, self.cap, self.num_tokens
            )
        return self._moved[key]


@dataclass(frozen=True, slots=True)
class TeacherRow:
    """Outputs of one teacher at the trained tokens of one row. N is the number of these tokens."""

    teacher: str
    positions_N: Tensor
    """Positions of the trained tokens in the student's row, int64 `[N]`, ascending."""
    outputs: tuple[Tensor, ...]
    """One of two forms. Either one tensor: the hidden states `[N, D]` from which the trained tokens
    are predicted. Or two tensors: the ids `[N, K]` of the K tokens that are likeliest to the
    teacher at each position, and log-probabilities `[N, K + 1]`: of these K tokens, then of all
    other tokens together."""
    head: OutputHead | None = None
    """Last layer of the teacher, which turns hidden states into logits. The student sets it: one
    head for all rows of a teacher. None until then, and for the top-k form of `outputs`."""

    @property
    def num_bytes(self) -> int:
        """Size of positions and outputs in bytes; `head` does not count."""
        return sum(part.nbytes for part in (self.positions_N, *self.outputs))
