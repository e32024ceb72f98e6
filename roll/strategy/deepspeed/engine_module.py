"""The module that DeepSpeed sees: a model whose forward pass ends in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.strategy.training.token_model import ForwardRequest, Outputs, TokenModel

T = TypeVar("T")
Run = Callable[[Tensor, ForwardRequest], Tensor]


class Root(nn.Module, Generic[T]):
    """A `TokenModel`, its results stacked.

    ZeRO-3 compares what modules the ranks have run, and counts one whose output has two tensors
    twice in the backward pass, if both are used. Whether the entropy is depends on the loss, and on
    whether the rank had rows left.
    """

    model: PreTrainedModel

    def __init__(self, whole: TokenModel[T]) -> None:
        super().__init__()
        self.model = whole.model
        # In a tuple, so that it is not registered: its own call would be counted too.
        self._whole = (whole,)

    def train(self, mode: bool = True) -> Self:
        """As the `TokenModel` does it, which is no module of this one."""
        super().train(mode)
        self._whole[0].train(mode)
        return self

    def forward(self, tokens_BT: Tensor, request: ForwardRequest) -> Tensor:
        """The tensors that there are, `[1, ...]` to `[3, ...]`."""
        parts = self._whole[0].forward(tokens_BT, request)
        return torch.stack([part for part in parts if part is not None])


class Unstacked(Generic[T]):
    """Calls a `Root`, or DeepSpeed's engine around it, as the `TokenModel` it was."""

    def __init__(self, run: Run, whole: TokenModel[T]) -> None:
        self._run = run
        self.terms = whole.terms
        self.needed = whole.needed
        self.collect = whole.collect
        self.packs = whole.packs

    def __call__(self, tokens_BT: Tensor, request: ForwardRequest) -> Outputs:
        main, *more = self._run(tokens_BT, request).unbind()
        divergence = more.pop() if request.teacher_outputs is not None else None
        return main, more[0] if more else None, divergence


def as_token_model(run: Run, whole: TokenModel[T]) -> TokenModel[T]:
    """Present the module to `strategy/training/forward.py`, which reads these attributes."""
    return cast(TokenModel[T], Unstacked(run, whole))
