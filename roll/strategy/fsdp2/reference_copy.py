"""A copy of the trained weights that follows them: the reference of a policy.

The copy is sharded as the weights are, in their dtype. To compute with it, its values and those of
the model change places, one parameter after the other, so nothing is gathered and hardly any
memory is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from roll.platform.cuda import wait_for_device
from roll.strategy.fsdp2.export import local
from roll.strategy.tensor_names import trained


class ReferenceCopy:
    """The copy, which is equal to the model's weights at first."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._params = dict(trained(model))
        self.values: dict[str, Tensor] = {
            name: p.detach().clone() for name, p in self._params.items()
        }
        """Values by the name of the parameter."""

    @torch.no_grad()
    def move(self, decay: float) -> None:
        """Make the copy `decay` times itself plus 1 - `decay` times the model's weights."""
        for name, p in self._params.items():
            if decay:
                local(self.values[name]).lerp_(local(p), 1 - decay)
            else:
                local(self.values[name]).copy_(local(p))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the copy inside the block. Every bit is as before then."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def to(self, device: torch.device) -> None:
        """Move the copy to a device."""
        self.values = {name: value.to(device) for name, value in self.values.items()}

    @torch.no_grad()
    def _exchange(self) -> None:
        # With `cpu_offload` a GPU reads the values from host memory when it comes to it. Those of
        # the last pass may still be read for other ranks, which have more tokens.
        wait_for_device()
        for name, p in self._params.items():
            ours, theirs = local(self.values[name]), local(p)
            kept = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(kept)
