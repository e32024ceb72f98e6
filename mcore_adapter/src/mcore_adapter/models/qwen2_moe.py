"""qwen2_moe, qwen3_moe: some layers have experts, the others one wide MLP."""

from __future__ import annotations

from typing import Any

from mcore_adapter.convert.ops import Rename
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models import llama
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
from mcore_adapter.models.fields import Config, Fields, with_experts


def table(config: Config) -> ModelTable:
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


def fields(config: Config) -> Fields:
    """qwen2_moe, qwen3_moe: some layers have experts, qwen2_moe has one that all tokens visit."""
    second, base = config["model_type"] == "qwen2_moe", llama.fields(config)
    biased = bool(config.get("qkv_bias", True) if second else config.get("attention_bias", False))
    values = {**base.config, "add_qkv_bias": biased, "qk_layernorm": not second}
    sparse = sparse_layers(config)
    shared: dict[str, Any] = {}
    if second:
        shared = {
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
        }
    return with_experts(
        Fields(config=values, rope_width=base.rope_width, out_bias=biased and not second),
        experts=num_experts_of(config),
        width=config["moe_intermediate_size"],
        topk=config["num_experts_per_tok"],
        sparse=[layer in sparse for layer in range(config["num_hidden_layers"])],
        # Megatron-Core names the order of softmax and choice; to choose first is to normalise.
        moe_router_pre_softmax=not config.get("norm_topk_prob", False),
        **shared,
    )


def shared_expert(layers: Layers, ours: str = MCORE, theirs: str = HF) -> tuple[Param, ...]:
    """One wide expert for every token, weighted by a gate of its own."""
    ours, theirs = ours + "mlp.shared_experts.", theirs + "mlp.shared_expert"
    return (
        *gated_mlp(ours, theirs + ".", layers=layers),
        Param(op=Rename(ours + "gate_weight", theirs + "_gate.weight"), layers=layers),
    )


def sparse_layers(config: Config) -> tuple[int, ...]:
    """Layers with experts: every `decoder_sparse_step`-th but those named dense."""
    step = config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
