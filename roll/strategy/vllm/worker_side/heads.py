"""Embeddings and output heads: where a push writes into vLLM's own memory, and what must follow.

They are the largest tensors of small models, and vLLM keeps them as they come: rows of the
vocabulary, padded at the end. A push writes them there directly; through vLLM's reload they would
exist three times for a moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from roll.weight_sync.manifest import TensorMeta


class EmbeddingMemory:
    """The memory of a model's embeddings and heads on the CPU, by Hugging Face name.

    Those of a model that is quantized, or split over ranks, are left to vLLM's reload.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows = dict(_plain_rows(model))

    def __call__(self, meta: TensorMeta) -> Tensor | None:
        rows = self._rows.get(meta.name)
        fits = rows is not None and (tuple(rows.shape), rows.dtype) == (
            meta.shape,
            meta.torch_dtype,
        )
        return rows if fits else None

    def holds(self, tensor: Tensor) -> bool:
        """Whether a push wrote this tensor here."""
        return any(rows.data_ptr() == tensor.data_ptr() for rows in self._rows.values())


def repack_heads(model: nn.Module) -> None:
    """Make every output head compute with the weight it has now.

    On CPUs a head's kernel works on a packed copy. vLLM's reload repacks it with the head's weight,
    but sees nothing to load for a head that is tied to an embedding or was written to directly.
    """
    for head in {
        id(module): module for _, module in _vocabulary_layers(model, heads=True)
    }.values():
        head.quant_method.process_weights_after_loading(head)


def _plain_rows(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for path, layer in _vocabulary_layers(model, heads=False):
        weight: Tensor = layer.weight.data
        plain = type(layer.quant_method) is UnquantizedEmbeddingMethod and layer.tp_size == 1
        if plain and weight.device == torch.device("cpu"):
            yield f"{path.replace('.base_layer', '')}.weight", weight[: layer.org_vocab_size]


def _vocabulary_layers(model: nn.Module, *, heads: bool) -> Iterator[tuple[str, Any]]:
    """Embeddings and heads under all their names; `heads`: only what serves as a head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, VocabParallelEmbedding):
            # Some models use the embedding itself as their head.
            is_head = isinstance(module, ParallelLMHead) or path.endswith("lm_head")
            if is_head or not heads:
                yield path, module
