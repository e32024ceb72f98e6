"""Direct loading of embeddings and output heads into vLLM's own memory.

They are the largest tensors of small models. vLLM keeps them in the layout of the checkpoint: rows
of the vocabulary, padded at the end. So a push writes them there directly; with vLLM's reload three
copies of them would exist for a moment. Heads must be repacked afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from roll.strategy.vllm.worker_side.names import ModulePaths
from roll.weight_sync.manifest import TensorMeta


class EmbeddingMemory:
    """Memory of a model's embeddings and heads on the CPU; called for a tensor, returns its memory.

    Layers that are quantized or split over ranks are left out; vLLM's reload loads these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows = dict(_plain_rows(model))
        self._path_of = ModulePaths(model)

    def __call__(self, meta: TensorMeta) -> Tensor | None:
        """Return the memory for a tensor; None if vLLM's reload must load the tensor."""
        rows = self._rows.get(self._path_of(meta.name))
        fits = rows is not None and (tuple(rows.shape), rows.dtype) == (
            meta.shape,
            meta.torch_dtype,
        )
        return rows if fits else None

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` lies in this memory, so that it is loaded already."""
        return any(rows.data_ptr() == tensor.data_ptr() for rows in self._rows.values())


def repack_heads(model: nn.Module) -> None:
    """Make every output head compute with its current weight.

    On CPUs a head's kernel reads a packed copy of the weight. vLLM's reload makes this copy anew
    when it loads a head. But it loads nothing for a head that is tied to an embedding or was
    written to directly. A model without a head (Gemma 2) computes logits with its embedding.
    """
    heads = [module for _, module in _vocabulary_layers(model, heads=True)]
    heads = heads or [module for _, module in _vocabulary_layers(model, heads=False)]
    for head in dict.fromkeys(heads):
        head.quant_method.process_weights_after_loading(head)


def _plain_rows(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (path of the weight, rows without padding) of each layer that can be written to."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for path, layer in _vocabulary_layers(model, heads=False):
        weight: Tensor = layer.weight.data
        plain = type(layer.quant_method) is UnquantizedEmbeddingMethod and layer.tp_size == 1
        if plain and weight.device == torch.device("cpu"):
            yield f"{path.replace('.base_layer', '')}.weight", weight[: layer.org_vocab_size]


def _vocabulary_layers(model: nn.Module, *, heads: bool) -> Iterator[tuple[str, Any]]:
    """Yield (path, layer) of embeddings and heads, once per name; with `heads` only of heads."""
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
