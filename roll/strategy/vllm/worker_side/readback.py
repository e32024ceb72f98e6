"""Proves that a vLLM model computes with the weights it was sent.

Checksums prove what arrived; they cannot see the model's own copies, which vLLM fuses (q, k and v
in one matrix) and packs in layouts it does not undo. What can be asked of any layout is the
product with a vector: a random probe of each matrix, taken as it comes in, must equal the layer's
own answer to the same probe (Freivalds' check; a wrong element goes unseen with probability zero
up to rounding). Vectors are compared as they are.

Asked are linear layers, embeddings, heads, norms and, by expert_probes.py, fused experts. Not asked
are tensors of other modules, other parameters than `weight` (biases), and layers whose tensors have
other names in the checkpoint than in vLLM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from roll.strategy.vllm.worker_side.expert_probes import ExpertProbes
from roll.strategy.vllm.worker_side.probing import asking, compare, probe


class Probes:
    """Each received tensor's answer to its probe: `[out]` for a matrix, itself for a vector.

    Args:
        model: vLLM's, which is asked when all have come.
    """

    def __init__(self, model: nn.Module) -> None:
        self.answers: dict[str, Tensor] = {}
        self.experts = ExpertProbes(model)

    def add(self, name: str, tensor: Tensor) -> None:
        if self.experts.add(name, tensor):
            return
        if tensor.dim() == 2:
            self.answers[name] = tensor.float() @ probe(tensor.shape[1], tensor.device)
        elif tensor.dim() == 1:
            self.answers[name] = tensor.float().clone()


@torch.inference_mode()
def read_back(model: nn.Module, probes: Probes) -> int:
    """Compare every layer that can be asked; the number of received tensors compared.

    With tensor parallelism a rank holds a part of most matrices; of embeddings and heads its own
    rows are compared, of the rest only what is whole.

    Raises:
        WeightSyncError: a layer answers with other weights than were sent.
    """
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    compared = probes.experts.compare()
    for path, module in model.named_modules():
        if isinstance(module, LinearBase):
            if (
                isinstance(module, RowParallelLinear)
                and module.input_size_per_partition != module.input_size
            ):
                continue  # has all rows, but only some columns
            names = _source_names(model, path)
            answer = _ask(path, module, probe(module.input_size, next(module.parameters()).device))
        elif isinstance(module, VocabParallelEmbedding):
            names = [f"{path}.weight"]
            if isinstance(module, ParallelLMHead):
                if names[0] not in probes.answers:  # tied
                    names = ["model.embed_tokens.weight"]
                # By its kernel: it keeps a packed copy beside the weight it shares.
                answer = _ask(path, module, probe(module.embedding_dim, module.weight.device))
            else:
                weight: Tensor = module.weight
                answer = weight.float() @ probe(weight.shape[1], weight.device)
        elif isinstance(weight := module._parameters.get("weight"), Tensor) and weight.dim() == 1:
            names, answer = [f"{path}.weight"], weight.float()
        else:
            continue
        if not all(name in probes.answers for name in names):
            continue
        expected = torch.cat([probes.answers[name] for name in names]).to(answer.device)
        if isinstance(module, VocabParallelEmbedding):
            rows = module.shard_indices  # the rank's own; those after them are padding
            expected = expected[rows.org_vocab_start_index : rows.org_vocab_end_index]
            answer = answer[: rows.num_org_elements]
        if answer.shape != expected.shape:
            continue
        compare(f"layer {path!r}", answer, expected, next(model.parameters()).dtype)
        compared += len(names)
    return compared


def _source_names(model: Any, path: str) -> list[str]:
    """Names in the checkpoint of what a linear layer of vLLM holds."""
    parent, _, leaf = path.rpartition(".")
    parts = model.packed_modules_mapping.get(leaf, [leaf])
    return [f"{parent}.{part}.weight" for part in parts]


def _ask(path: str, module: Any, vector: Tensor) -> Tensor:
    dtype: torch.dtype = next(module.parameters()).dtype
    with asking(path):
        answer: Tensor = module.quant_method.apply(module, vector.to(dtype)[None], None)
    return answer[0].float()
