"""The module that DeepSpeed gets: a model whose forward pass returns a single tensor."""

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
    """A `TokenModel` whose outputs are stacked to a single tensor.

    ZeRO-3 compares the modules that the ranks have run. In the backward pass ZeRO-3 counts a module
    with two output tensors twice if both tensors are used. The use of the entropy depends on the
    loss and on whether the rank has rows left, so with two tensors the counts of the ranks could
    differ.
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
        """Set the mode of the `TokenModel` too, which is not a registered submodule."""
        super().train(mode)
        self._whole[0].train(mode)
        return self

    def forward(self, tokens_BT: Tensor, request: ForwardRequest) -> Tensor:
        """Stack the outputs that are not None, `[1, ...]` to `[3, ...]`; set `fields`."""
        parts = self._whole[0].forward(tokens_BT, request)._asdict()
        self.fields = [name for name, part in parts.items() if part is not None]
        return torch.stack([parts[name] for name in self.fields])


class Unstacked(Generic[T]):
    """Wrapper that makes a `Root`, or DeepSpeed's engine around a `Root`, look like a `TokenModel`.

    Args:
        run: the `Root` or the engine.
        root: the `Root`, which names the outputs of its last forward pass.
    """

    def __init__(self, run: Run, root: Root[T]) -> None:
        self._run, self._root = run, root
        whole = root.whole
        self.terms = whole.terms
        self.needed = whole.needed
        self.trains_tower_alone = whole.trains_tower_alone
        self.collect = whole.collect
        self.packs = whole.packs
        self.tower = whole.tower
        self.border = whole.border

    def __call__(self, tokens_BT: Tensor, request: ForwardRequest) -> ModelOutputs:
        parts = self._run(tokens_BT, request).unbind()
        return ModelOutputs(**dict(zip(self._root.fields, parts, strict=True)))


def as_token_model(run: Run, root: Root[T]) -> TokenModel[T]:
    """Wrap `run` for `strategy/training/forward.py`, which uses only attributes of `Unstacked`."""
    return cast(TokenModel[T], Unstacked(run, root))
