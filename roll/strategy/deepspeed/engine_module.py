"""The module that DeepSpeed sees: a model whose forward pass ends in one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.strategy.training.token_model import ForwardRequest, ModelOutputs, TokenModel

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
        self.fields: list[str] = []
        """Names of the outputs that the last forward pass gave, in the order of their stack."""

    @property
    def whole(self) -> TokenModel[T]:
        """The model that this module stands for."""
        return self._whole[0]

    def train(self, mode: bool = True) -> Self:
        """As the `TokenModel` does it, which is no module of this one."""
        super().train(mode)
        self._whole[0].train(mode)
        return self

    def forward(self, tokens_BT: Tensor, request: ForwardRequest) -> Tensor:
        """The tensors that there are, `[1, ...]` to `[3, ...]`."""
        parts = self._whole[0].forward(tokens_BT, request)._asdict()
        self.fields = [name for name, part in parts.items() if part is not None]
        return torch.stack([parts[name] for name in self.fields])


class Unstacked(Generic[T]):
    """Calls a `Root`, or DeepSpeed's engine around it, as the `TokenModel` it was."""

    def __init__(self, run: Run, root: Root[T]) -> None:
        self._run, self._root = run, root
        whole = root.whole
        self.terms = whole.terms
        self.needed = whole.needed
        self.collect = whole.collect
        self.packs = whole.packs

    def __call__(self, tokens_BT: Tensor, request: ForwardRequest) -> ModelOutputs:
        parts = self._run(tokens_BT, request).unbind()
        return ModelOutputs(**dict(zip(self._root.fields, parts, strict=True)))


def as_token_model(run: Run, root: Root[T]) -> TokenModel[T]:
    """Present the module to `strategy/training/forward.py`, which reads these attributes."""
    return cast(TokenModel[T], Unstacked(run, root))
