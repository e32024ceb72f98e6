"""What teachers say of tokens, as it travels to the students."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The last layer of a language model, whole: `(hidden @ weight^T + bias) / divisor`."""

    weight_VD: Tensor
    bias_V: Tensor | None
    divisor: float
    _moved: dict[torch.device, OutputHead] = field(default_factory=dict, repr=False, compare=False)

    def stay_home(self) -> None:
        """Leave every device."""
        self._moved.clear()

    def on(self, device: torch.device) -> OutputHead:
        """The same on `device`, where it stays until `stay_home`."""
        if device not in self._moved:
            bias_V = None if self.bias_V is None else self.bias_V.to(device)
            self._moved[device] = OutputHead(self.weight_VD.to(device), bias_V, self.divisor)
        return self._moved[device]


@dataclass(frozen=True, slots=True)
class TeacherRow:
    """What its teacher says of the trained tokens of one row."""

    teacher: str
    positions_N: Tensor
    """Int64; where in the row they are, ascending."""
    outputs: tuple[Tensor, ...]
    """The hidden states `[N, D]` that come before them; or the ids `[N, K]` of the tokens that
    seemed likeliest there and log-probs `[N, K + 1]`, the last of them that of all others."""
    head: OutputHead | None = None
    """What makes logits of hidden states; whoever learns has one for all rows of a teacher."""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.positions_N, *self.outputs))
