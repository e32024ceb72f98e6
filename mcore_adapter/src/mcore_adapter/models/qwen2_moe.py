"""qwen2_moe, qwen3_moe: some layers have experts, the others one wide MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_adapter.convert.ops import Rename
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models.common import (
    HF,
    MCORE,
    Layers,
    attention,
    ends,
    gated_mlp,
    norms,
    num_experts_of,
    shape_of,
    tied_output,
)


def table(config: Mapping[str, Any]) -> ModelTable:
    second = config["model_type"] == "qwen2_moe"
    shape = shape_of(config, num_experts=num_experts_of(config))
    sparse = sparse_layers(config)
    dense = tuple(layer for layer in range(shape.num_layers) if layer not in sparse)
    biased = bool(config.get("qkv_bias", second) if second else config.get("attention_bias"))
    mcore, hf = MCORE + "mlp.", HF + "mlp."
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=(
            *ends(shape),
            *norms(),
            *attention(qkv_bias=biased, out_bias=biased and not second, qk_norm=not second),
            *gated_mlp(layers=dense),
            Param(op=Rename(mcore + "router.weight", hf + "gate.weight"), layers=sparse),
            *gated_mlp(mcore + "experts.local_experts.@.", hf + "experts.@.", layers=sparse),
            *(shared_expert(sparse) if second else ()),
        ),
        repeats=tied_output(shape),
        config=config,
    )


def shared_expert(layers: Layers, ours: str = MCORE, theirs: str = HF) -> tuple[Param, ...]:
    """One wide expert for every token, weighted by a gate of its own."""
    ours, theirs = ours + "mlp.shared_experts.", theirs + "mlp.shared_expert"
    return (
        *gated_mlp(ours, theirs + ".", layers=layers),
        Param(op=Rename(ours + "gate_weight", theirs + "_gate.weight"), layers=layers),
    )


def sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers with experts: every `decoder_sparse_step`-th but those named dense."""
    step = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
