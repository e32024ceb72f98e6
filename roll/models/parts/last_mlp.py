"""Feed-forward part (MLP) of a model's last layer, computed only at the tokens that are read.

Nothing after this part uses other tokens, so its results at tokens that nobody reads are useless:
those of the prompt in a policy, and all but the last token in a reward model.
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
        "qwen2_5_vl_text",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_vl_text",
        "seed_oss",
        "smollm3",
    }
)
"""Model types whose last layer is applied last, and only once, and ends in a feed-forward part that
processes each token independently."""
_WORTHWHILE = 0.75
"""Largest share of read tokens for which selecting them is faster than computing all tokens."""
_ARGUMENT = "last_mlp_reads"


class LastMlp:
    """Hooks that make a model compute its last feed-forward part only at selected tokens."""

    def __init__(self, layer: nn.Module, mlp: nn.Module) -> None:
        self._read_N: Tensor | None = None
        self._shape = torch.Size()
        # The hook is on the layer, because gradient checkpointing computes the layer again with the
        # layer's arguments.
        self._hooks = [
            layer.register_forward_pre_hook(self._take, with_kwargs=True),
            mlp.register_forward_pre_hook(self._select),
            mlp.register_forward_hook(self._spread),
        ]

    def remove(self) -> None:
        """Let the model compute its last feed-forward part at all tokens again."""
        for hook in self._hooks:
            hook.remove()

    def arguments(self, read_N: Tensor, tokens: int) -> dict[str, Tensor]:
        """Return arguments for a forward pass of the model of which only some states are read.

        The result is empty, so that all tokens are computed, if no tokens or too many are read.

        Args:
            read_N: flat indices of the tokens whose hidden states are read, int64.
            tokens: number of tokens in the forward pass.
        """
        return {_ARGUMENT: read_N} if 0 < len(read_N) <= _WORTHWHILE * tokens else {}

    def _take(self, layer: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """Take the indices of the read tokens from the arguments of the layer."""
        self._read_N = arguments.get(_ARGUMENT)
        rest = {name: value for name, value in arguments.items() if name != _ARGUMENT}
        return inputs, rest

    def _select(self, mlp: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Return the input of the MLP at the read tokens, `[N, D]`; None: leave it as it is."""
        if self._read_N is None:
            return None
        (states_BTD,) = inputs
        self._shape = states_BTD.shape
        return states_BTD.flatten(0, 1).index_select(0, self._read_N)

    def _spread(self, mlp: nn.Module, inputs: Any, states_ND: Tensor) -> Tensor | None:
        """Return the results at their places in `[B, T, D]`, 0 elsewhere; None: leave them."""
        if self._read_N is None:
            return None
        rows, width, _ = self._shape
        whole = states_ND.new_zeros(rows * width, states_ND.shape[-1])
        return whole.index_copy_(0, self._read_N, states_ND).unflatten(0, (rows, width))


def find(model: PreTrainedModel) -> LastMlp | None:
    """Install the hooks on `model`; return None if its architecture is not known to allow them."""
    if model.config.get_text_config().model_type not in KNOWN:
        return None
    layer = model.get_decoder().layers[-1]
    return LastMlp(layer, layer.mlp)
