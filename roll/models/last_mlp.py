"""The feed-forward part of a model's last layer, computed only at the tokens that are read.

Nothing after it looks at other tokens, so what it gives them is of no use: the prompt's in a
policy, all but the last in a reward model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

KNOWN = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
    }
)
"""Types of models whose last layer comes last, once, and ends in a feed-forward part that takes
each token by itself."""
_WORTHWHILE = 0.75
"""Of the tokens, at most so many are computed by themselves; moving more costs what it saves."""
_ARGUMENT = "last_mlp_reads"


class LastMlp:
    """Hooks on the last feed-forward part of one model."""

    def __init__(self, layer: nn.Module, mlp: nn.Module) -> None:
        self._read_N: Tensor | None = None
        self._shape = torch.Size()
        # The layer's arguments, as those are what it is computed again with in a backward pass.
        layer.register_forward_pre_hook(self._take, with_kwargs=True)
        mlp.register_forward_pre_hook(self._select)
        mlp.register_forward_hook(self._spread)

    def arguments(self, read_N: Tensor, tokens: int) -> dict[str, Tensor]:
        """Of a forward pass of the model in which no other tokens' states are read.

        Args:
            read_N: flat indices of those that are.
            tokens: that the pass takes.
        """
        return {_ARGUMENT: read_N} if 0 < len(read_N) <= _WORTHWHILE * tokens else {}

    def _take(self, layer: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        self._read_N = arguments.get(_ARGUMENT)
        rest = {name: value for name, value in arguments.items() if name != _ARGUMENT}
        return inputs, rest

    def _select(self, mlp: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
        if self._read_N is None:
            return None
        (states_BTD,) = inputs
        self._shape = states_BTD.shape
        return states_BTD.flatten(0, 1)[self._read_N]

    def _spread(self, mlp: nn.Module, inputs: Any, states_ND: Tensor) -> Tensor | None:
        if self._read_N is None:
            return None
        rows, width, _ = self._shape
        whole = states_ND.new_zeros(rows * width, states_ND.shape[-1])
        return whole.index_copy_(0, self._read_N, states_ND).unflatten(0, (rows, width))


def find(model: PreTrainedModel) -> LastMlp | None:
    """That of `model`, if its architecture is known to allow it."""
    if model.config.get_text_config().model_type not in KNOWN:
        return None
    layer = model.get_decoder().layers[-1]
    return LastMlp(layer, layer.mlp)
