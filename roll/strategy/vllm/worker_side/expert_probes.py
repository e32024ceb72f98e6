"""A check that vLLM's fused experts compute with the weights that they were sent.

vLLM fuses all experts of a layer, and packs, pads or swaps their matrices as the layer's kernel
needs them. The check therefore uses the kernel itself: it computes each expert's output for a probe
vector, which must equal the output of the three matrices that arrived for the expert. If the
product of a row of `up` with the probe is almost zero, a small fault in the same row of `gate` goes
unseen.

The check covers experts without biases or quantization, with a gated SiLU or GELU, and with one
checkpoint tensor per matrix; ranks may split the rows of each expert or hold whole experts. It does
not cover other experts, nor experts that vLLM places itself (expert load balancing) or exchanges
between data-parallel replicas, nor experts whose kernel also does the routing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from roll.strategy.vllm.worker_side.probing import asking, compare, probe

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(slots=True)
class _Expert:
    """Tensors that have arrived for one expert of a layer."""

    layer: Any
    index: int
    gate: Tensor | None = None
    """Product of the gate matrix with the probe, float32 `[I]`."""
    up: Tensor | None = None
    """Product of the up matrix with the probe, float32 `[I]`."""
    down: Tensor | None = None
    """The down matrix itself, `[H, I]`, kept until `gate` and `up` have arrived."""
    answer: Tensor | None = None
    """The expert's output for the probe, float32 `[H]`: this rank's part of the sum over ranks."""


@dataclass(slots=True)
class ExpertProbes:
    """Expected outputs of the experts, computed while their tensors arrive.

    A `down_proj` is kept until the expert's other two matrices have arrived. In the order of
    checkpoints only one matrix at a time is kept.
    """

    model: nn.Module
    _parts: dict[str, tuple[_Expert, str]] = field(init=False)
    """Tensor's name -> its expert, and which matrix the tensor is: `gate`, `up` or `down`."""

    def __post_init__(self) -> None:
        self._parts = {
            f"{path}.{expert.index}.{name}.weight": (expert, part)
            for path, layer in _layers(self.model)
            for expert in [_Expert(layer, index) for index in _own_experts(layer)]
            for part, name in (
                ("gate", layer.ckpt_gate_proj_name),
                ("up", layer.ckpt_up_proj_name),
                ("down", layer.ckpt_down_proj_name),
            )
        }

    def add(self, name: str, tensor: Tensor) -> bool:
        """Add a tensor; return False if it belongs to no expert that can be checked."""
        if name not in self._parts:
            return False
        expert, part = self._parts[name]
        if part == "down":
            expert.down = tensor.clone()  # the transfer may overwrite its memory
        else:
            setattr(expert, part, tensor.float() @ probe(tensor.shape[1], tensor.device))
        if expert.gate is not None and expert.up is not None and expert.down is not None:
            act = _ACTIVATIONS[expert.layer.activation.value]
            config, inner_I = expert.layer.moe_config, act(expert.gate) * expert.up
            size = len(inner_I) // config.tp_size
            own = slice(size * config.tp_rank, size * (config.tp_rank + 1))
            expert.answer = expert.down[:, own].float() @ inner_I[own]
            expert.gate = expert.up = expert.down = None
        return True

    @torch.inference_mode()
    def compare(self) -> int:
        """Compare every expert that has arrived completely; return the number of tensors compared.

        Raises:
            WeightSyncError: an expert does not compute with the weights that were sent.
        """
        compared = 0
        for path, layer in _layers(self.model):
            gate = layer.ckpt_gate_proj_name
            names = {index: f"{path}.{index}.{gate}.weight" for index in _own_experts(layer)}
            came = {
                index: answer
                for index, name in names.items()
                if (answer := self._parts[name][0].answer) is not None
            }
            if not came:
                continue
            with asking(path):
                answers_EH = _ask(layer, list(came))
            for answer_H, (index, expected_H) in zip(answers_EH, came.items(), strict=True):
                compare(
                    f"expert {index} of layer {path!r}",
                    answer_H[: len(expected_H)],
                    expected_H.to(answer_H.device),
                    layer.params_dtype,
                    tf32=answer_H.is_cuda,  # by default, Triton does for products in float32
                )
            compared += 3 * len(came)
        return compared


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (prefix of its tensors' checkpoint names, layer) of each layer that can be checked."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    for path, layer in model.named_modules():
        if not isinstance(layer, RoutedExperts):
            continue
        config, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
        if (
            type(layer.quant_method) is UnquantizedFusedMoEMethod
            and not layer.quant_method.is_monolithic
            and not config.has_bias
            and layer.activation.value in _ACTIVATIONS
            and layer.swiglu_limit is None
            and not config.tp_shard_with_padding
            and not parallel.enable_eplb
            and not parallel.use_all2all_kernels
            and not config.use_deferred_moe_finalize
        ):
            yield path.removesuffix(".routed_experts").replace(".base_layer", ""), layer


def _own_experts(layer: Any) -> list[int]:
    """Return the checkpoint indices of the experts that this rank holds."""
    return [
        index
        for index in range(layer.global_num_experts)
        if layer._map_global_expert_id_to_local_expert_id(index) >= 0
    ]


def _ask(layer: Any, experts: list[int]) -> Tensor:
    """Compute the experts' outputs for the probe by the layer's kernel, float32 `[experts, H]`."""
    device = layer.w13_weight.device
    x_H = torch.zeros(layer.hidden_size, dtype=layer.params_dtype, device=device)
    hidden = layer.moe_config.hidden_dim_unpadded
    x_H[:hidden] = probe(hidden, device)
    ids_dtype = layer.quant_method.topk_indices_dtype or torch.int32
    answers: Tensor = layer.quant_method.apply(
        layer=layer,
        x=x_H.repeat(len(experts), 1),
        topk_weights=torch.ones(len(experts), 1, device=device),
        topk_ids=torch.tensor(experts, dtype=ids_dtype, device=device)[:, None],
        shared_experts=None,
        shared_experts_input=None,
    )
    return answers.float()
