"""qwen2_moe, qwen3_moe: some layers have experts, the others have one wide MLP."""

from __future__ import annotations

from typing import Any

from mcore_adapter.convert.ops import Shape
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models.common import (
    HF,
    MCORE,
    Layers,
    attention,
    gated_mlp,
    model_table,
    norms,
    same,
    shape_of,
)
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.fields import Attention, Fields, with_experts


def attention_of(config: Config) -> Attention:
    """Return the variant of attention, whose biases depend on other keys in qwen2_moe."""
    if config["model_type"] == "qwen2_moe":
        return Attention(qkv_bias=config.flag("qkv_bias"))
    biased = config.flag("attention_bias")
    return Attention(qkv_bias=biased, out_bias=biased, qk_norm=True)


def shared_width(config: Config) -> int | None:
    """Return the number of hidden dimensions of the expert that all tokens visit.

    None if the model type has no such expert.
    """
    if config["model_type"] == "qwen3_moe":
        return None
    return config.count("shared_expert_intermediate_size")


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights, for both model types of this module."""
    shape = shape_of(config, num_experts=config.count("num_experts"))
    return model_table(
        config,
        shape,
        *norms(shape),
        *attention(shape, attention_of(config)),
        *mlps(config, shape),
    )


def fields(config: Config) -> Fields:
    """Return fields with experts in some layers.

    In qwen2_moe, such a layer also has one expert that all tokens visit.
    """
    return with_sparse_layers(llama.dense_fields(config, attention_of(config)), config)


def mlps(config: Config, shape: Shape) -> tuple[Param, ...]:
    """Return the rows of the MLPs, of layers with experts and of layers without."""
    sparse = sparse_layers(config)
    dense = tuple(layer for layer in range(shape.num_layers) if layer not in set(sparse))
    return (
        *gated_mlp(shape, config.count("intermediate_size"), layers=dense),
        *experts(config, shape, MCORE + "mlp.", HF + "mlp.", layers=sparse),
    )


def experts(
    config: Config, shape: Shape, ours: str, theirs: str, *, layers: Layers = None
) -> tuple[Param, ...]:
    """Return the rows of a router and its experts.

    In some families there is also an expert that all tokens visit, with a gate. `ours` and `theirs`
    are the prefixes of the layer's MLP, such as `decoder.layers.*.mlp.`.
    """
    of_experts = gated_mlp(
        shape,
        config.count("moe_intermediate_size"),
        ours + "experts.local_experts.@.",
        theirs + "experts.@.",
        layers=layers,
    )
    router = (shape.num_experts, shape.hidden)
    rows = [
        same(ours + "router.weight", theirs + "gate.weight", router, layers=layers),
        *of_experts,
    ]
    width = shared_width(config)
    if width is not None:
        ours, theirs, gate = ours + "shared_experts.", theirs + "shared_expert", (1, shape.hidden)
        rows += gated_mlp(shape, width, ours, theirs + ".", layers=layers)
        rows.append(same(ours + "gate_weight", theirs + "_gate.weight", gate, layers=layers))
    return tuple(rows)


def with_sparse_layers(base: Fields, config: Config) -> Fields:
    """Add the fields of the experts for which `mlps` has rows; return `base` if there are none."""
    sparse = set(sparse_layers(config))
    if not sparse:
        return base
    more: dict[str, Any] = {}
    width = shared_width(config)
    if width is not None:
        more = {
            "moe_shared_expert_intermediate_size": int(width),
            "moe_shared_expert_gate": True,
        }
    return with_experts(
        base,
        experts=config["num_experts"],
        width=config["moe_intermediate_size"],
        topk=config["num_experts_per_tok"],
        sparse=[layer in sparse for layer in range(config["num_hidden_layers"])],
        # Megatron-Core's field is the order of softmax and choice of experts: if the choice comes
        # first, the probabilities of the chosen experts are normalised.
        moe_router_pre_softmax=not config.flag("norm_topk_prob"),
        **more,
    )


def sparse_layers(config: Config) -> tuple[int, ...]:
    """Return the layers with experts; none if the model has no experts.

    They are every `decoder_sparse_step`-th layer except those in `mlp_only_layers`.
    """
    if config["num_experts"] == 0:
        return ()
    step, dense = config["decoder_sparse_step"], set(config["mlp_only_layers"] or ())
    layers = range(config["num_hidden_layers"])
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
