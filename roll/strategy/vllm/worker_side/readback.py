"""A check that a vLLM model computes with the weights that it was sent.

Checksums cover what arrived. They do not cover the model's own copies, which vLLM fuses (q, k and v
into one matrix) and packs into layouts that it cannot unpack. But a layer can multiply its matrix
with a vector in any layout. So each matrix is multiplied with a random probe vector when it
arrives, and the layer's own product with the same probe must be equal (Freivalds' check; a single
wrong element always shows, up to rounding). Vectors are compared directly.

The check covers linear layers, embeddings, heads, norms and, in expert_probes.py, fused experts. It
does not cover tensors of other modules, parameters other than `weight` (biases), and layers whose
tensors vLLM renames in other ways than those of names.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from roll.strategy.vllm.worker_side.expert_probes import ExpertProbes
from roll.strategy.vllm.worker_side.names import ModulePaths
from roll.strategy.vllm.worker_side.probing import asking, compare, probe


class Probes:
    """Expected answer of each received tensor, by vLLM's path, collected while tensors arrive.

    The answer of a matrix is its product with its probe, float32 `[out]`; the answer of a vector is
    the vector itself.

    Args:
        model: vLLM's model, whose layers are compared when all tensors have arrived.
    """

    def __init__(self, model: nn.Module) -> None:
        self.answers: dict[str, Tensor] = {}
        self._path_of = ModulePaths(model)
        self.experts = ExpertProbes(model)

    def add(self, name: str, tensor: Tensor) -> None:
        """Store the answer of a received tensor; none if it has three axes or more.

        Args:
            name: name of the tensor in the checkpoint.
        """
        name = self._path_of(name)
        if self.experts.add(name, tensor):
            return
        if tensor.dim() == 2:
            self.answers[name] = tensor.float() @ probe(tensor.shape[1], tensor.device)
        elif tensor.dim() == 1:
            self.answers[name] = tensor.float().clone()


@torch.inference_mode()
def read_back(model: nn.Module, probes: Probes) -> int:
    """Compare every layer that can be checked; return the number of received tensors compared.

    With tensor parallelism a rank holds only a part of most matrices. Of embeddings and heads the
    rank's own rows are compared; other layers are compared only if the rank holds all of them.

    Raises:
        WeightSyncError: a layer does not compute with the weights that were sent.
    """
    compared = probes.experts.compare()
    for path, module in model.named_modules():
        found = _answer(model, path, module, probes.answers)
        if found is None or not all(name in probes.answers for name in found[0]):
            continue
        names, answer, rows = found
        expected = torch.cat([probes.answers[name] for name in names]).to(answer.device)[rows]
        if answer.shape == expected.shape:
            compare(f"layer {path!r}", answer, expected, next(model.parameters()).dtype)
            compared += len(names)
    return compared


def _answer(
    model: nn.Module, path: str, module: nn.Module, expected: Mapping[str, Tensor]
) -> tuple[list[str], Tensor, slice] | None:
    """Compute a layer's answer, as in `Probes`; return None if the layer cannot be checked.

    Args:
        path: path of the layer in the model.
        expected: answers of the received tensors; a head that is not among them is tied.

    Returns:
        The paths of the layer's tensors, before vLLM stacks them; the answer; and the rows of the
        tensors that it belongs to.

    Raises:
        WeightSyncError: the layer failed.
    """
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    name, weight = f"{path}.weight", module._parameters.get("weight")
    if isinstance(module, LinearBase):
        columns = module.input_size
        if isinstance(module, RowParallelLinear) and module.input_size_per_partition != columns:
            return None  # holds all rows, but only some columns
        names = _source_names(model, path)
        if not all(source in expected for source in names):
            return None  # such as a convolution, which cannot be asked like a matrix
        vector = probe(columns, next(module.parameters()).device)
        return names, _ask(path, module, vector), slice(None)
    if isinstance(module, VocabParallelEmbedding):
        if isinstance(module, ParallelLMHead):
            if name not in expected:  # the head is tied to the embedding
                name = f"{path.removesuffix('lm_head')}model.embed_tokens.weight"
            # Computed by the head's kernel, which has a packed copy beside the shared weight.
            answer = _ask(path, module, probe(module.embedding_dim, module.weight.device))
        else:
            answer = module.weight.float() @ probe(module.weight.shape[1], module.weight.device)
        own = module.shard_indices  # the rank's own rows; the rows after them are padding
        rows = slice(own.org_vocab_start_index, own.org_vocab_end_index)
        return [name], answer[: own.num_org_elements], rows
    if isinstance(weight, Tensor) and weight.dim() == 1:
        return [name], weight.float(), slice(None)
    return None


def _source_names(model: Any, path: str) -> list[str]:
    """Return the paths of the weights, without biases, that a linear layer of vLLM holds, before it
    stacks them, in the order in which it stacks their rows."""
    parent, _, leaf = path.rpartition(".")
    parts = model.packed_modules_mapping.get(leaf, [leaf])
    return [f"{parent}.{part}.weight" for part in parts]


def _ask(path: str, module: Any, vector: Tensor) -> Tensor:
    """Return the product of a layer's weight with `vector`, by its kernel, float32 `[out]`.

    Raises:
        WeightSyncError: the kernel failed.
    """
    dtype: torch.dtype = next(module.parameters()).dtype
    with asking(path):
        answer: Tensor = module.quant_method.apply(module, vector.to(dtype)[None], None)
    return answer[0].float()
