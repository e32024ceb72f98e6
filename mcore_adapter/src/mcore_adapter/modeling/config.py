"""Translation of a Hugging Face config into Megatron-Core's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mcore_adapter.errors import ConfigError, LayoutError
from mcore_adapter.modeling.rope import Rope, rope_of
from mcore_adapter.models import fields_of, table_of
from mcore_adapter.models.common import num_mtp_layers
from mcore_adapter.models.config import Config, completed
from mcore_adapter.models.fields import Fields, Traits, Vision
from mcore_adapter.models.further_layers import why_not_built
from mcore_adapter.models.scores import ScoreHead
from mcore_adapter.models.shared_rows import why_not_shared
from mcore_adapter.parallel_sizes import ParallelSizes

ACTIVATIONS = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
}
"""Activation functions, by the value of `hidden_act` in a `config.json`."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a model that are not in its `config.json`."""

    dtype: torch.dtype = torch.float32
    """Dtype of the weights."""
    random_weights: bool = True
    """False to leave the weights without values, because all of them will be loaded. On a CPU
    Megatron-Core draws each weight whole and in float32 before it cuts it."""
    sequence_parallel: bool | None = None
    """True to divide activations by tokens over the tensor parallel ranks. None: only where
    Megatron-Core needs it, with experts or latent attention and tp > 1."""
    recompute: Literal["none", "attention", "full"] = "none"
    """Activations that are computed again in the backward pass instead of kept: `attention` for
    those of core attention, `full` for all but the input of each layer."""
    te: bool = False
    """True to use Transformer Engine's layers. They fuse each norm into the linear layer after it,
    under names that the tables do not have: such a model can be trained, but not loaded or
    exported."""
    dispatcher: Literal["allgather", "alltoall"] | None = None
    """Method by which tokens are sent to experts. None: `alltoall`, but `allgather` without CUDA if
    ep and etp are both more than 1: with `alltoall`, ranks would have to gather different numbers
    of tokens, which gloo does not support."""
    variable_lengths: bool = False
    """True if micro-batches of a pipeline may differ in shape. Not possible with the allgather
    dispatcher."""
    aux_loss_coeff: float = 0.0
    """Coefficient of the experts' load balancing loss. Its gradient is added to the gradients; its
    value is not added to the reported loss."""
    z_loss_coeff: float | None = None
    """Coefficient of the router's z loss; None: no such loss."""
    grouped_experts: bool = False
    """True to compute all experts of a rank in one grouped product instead of one after the other.
    This is faster on GPUs, where many small products are slow to start. With `te`, Transformer
    Engine's grouped product is used."""
    mtp: bool = False
    """True to build the layers for multi-token prediction (MTP), which lie on the last stage. The
    model must have such layers."""
    context_parallel: int = 1
    """Number of ranks that share the tokens of each row."""
    head: ScoreHead | None = None
    """Head with one output per token in place of the output layer; None: the model has its output
    layer."""
    router_replay: bool = False
    """True if experts can be given from outside instead of chosen by the router."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """All values from which a model is built."""

    transformer: TransformerConfig
    rope: Rope | None
    """Rotary frequencies; None if attention computes them itself."""
    te: bool
    """True if the layers are those of Transformer Engine."""
    grouped: bool
    """True if experts are grouped, see `BuildOptions.grouped_experts`."""
    traits: Traits
    local_rope: Rope | None
    """Rotary frequencies of the layers in `traits.local_rope`; None: there are none."""
    tied: bool
    """True if the output layer shares the weight of the embedding."""
    head: ScoreHead | None
    """See `BuildOptions.head`."""
    vocab: int
    """Number of tokens in the vocabulary, without padding."""
    pad: int | None
    """Token whose embedding is not trained; None: all are."""
    longest: int
    """Number of tokens of the longest sequence; has no effect on rotary models."""
    vision: Vision | None
    """Properties of a model that sees; None: it reads text only."""


def model_config(
    config: Mapping[str, Any], sizes: ParallelSizes, options: BuildOptions
) -> ModelConfig:
    """Translate a `config.json` into the config of a Megatron-Core model.

    Raises:
        ConfigError: the config names an activation, a rope or a layer that cannot be built.
        UnknownModelError: there is no family for its `model_type`.
        LayoutError: layers or other parts do not divide over `sizes`, or the options do not fit.
    """
    config = completed(config)
    fields = fields_of(config)
    activation = fields.config["activation_func"]
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: hidden_act {activation!r} is not supported, only {list(ACTIVATIONS)}"
        )
    rope = None if fields.latent else rope_of(config, fields.rope_width)
    local = _local_rope(config, fields)
    own = _own_values(config, fields, sizes, options)
    made = (MLATransformerConfig if fields.latent else TransformerConfig)(
        **{**_common_values(sizes, options, own), **own}
    )
    if rope is not None and rope.scale != 1.0:
        rope.set_scale(made)
    return ModelConfig(
        transformer=made,
        rope=rope,
        te=options.te,
        grouped=options.grouped_experts,
        traits=fields.traits,
        local_rope=local,
        tied=config.flag("tie_word_embeddings") and options.head is None,
        head=options.head,
        vocab=config["vocab_size"],
        pad=_pad(config),
        longest=config["max_position_embeddings"],
        vision=fields.vision,
    )


def _pad(config: Config) -> int | None:
    """Return the padding token; a negative one counts from the end, as in PyTorch's embeddings."""
    token = config["pad_token_id"]
    return None if token is None else int(token) % int(config["vocab_size"])


def _local_rope(config: Config, fields: Fields) -> Rope | None:
    """Return the frequencies of the layers with frequencies of their own, if there are any."""
    if not fields.traits.local_rope:
        return None
    return rope_of(config, fields.config["kv_channels"], "sliding_attention")


def _own_values(
    config: Config, fields: Fields, sizes: ParallelSizes, options: BuildOptions
) -> dict[str, Any]:
    """Return the values of Megatron-Core's config that the model's own config and options give.

    Raises:
        ConfigError: the options ask for MTP layers, and the model has none.
        LayoutError: sizes or options do not fit the model's experts or MTP layers.
    """
    values = dict(fields.config)
    if fields.vision is not None:
        values["mrope_section"] = list(fields.vision.sections)
    values["activation_func"] = ACTIVATIONS[values["activation_func"]]
    if "num_moe_experts" in values and values.get("add_bias_linear") and sizes.expert_tp > 1:
        raise LayoutError(
            f"experts of {config['model_type']} have biases, which Megatron-Core cannot cut over "
            f"etp = {sizes.expert_tp} ranks; say etp = 1"
        )
    if values.get("experimental_attention_variant") == "dsa" and options.recompute == "attention":
        raise LayoutError(
            f"recompute attention: the sparse attention of {config['model_type']} cannot be "
            "computed again by itself; say full, or none"
        )
    if options.context_parallel > 1:
        _check_shared_rows(config, sizes.tp, options)
    if options.mtp and options.head is not None:
        raise LayoutError("mtp: a model with a score head predicts no tokens; leave it out")
    if options.mtp:
        values["mtp_num_layers"] = _num_mtp_layers(config, sizes, options)
    if options.grouped_experts:
        _check_grouped(config, values, sizes, options)
    return values


def _common_values(
    sizes: ParallelSizes, options: BuildOptions, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values of the config that do not depend on the family, some on CUDA's presence.

    Args:
        own: values of the model, see `_own_values`; the caller lets them override these.

    Raises:
        LayoutError: layers do not divide over stages, or options do not fit a model with experts or
            latent attention.
    """
    sparse, cuda = "num_moe_experts" in own, torch.cuda.is_available()
    return {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        # Post-training runs without dropout: two passes over one sequence must agree.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": options.dtype,
        "pipeline_dtype": options.dtype,
        "bf16": options.dtype is torch.bfloat16,
        "fp16": options.dtype is torch.float16,
        "use_cpu_initialization": not cuda,
        "perform_initialization": options.random_weights,
        "variable_seq_lengths": options.variable_lengths,
        # Gloo cannot batch sends and receives.
        "batch_p2p_comm": cuda,
        "overlap_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
        "transformer_impl": "transformer_engine" if options.te else "local",
        **_parallel_values(sizes, options, own),
        **(_expert_values(options) if sparse else {}),
        **_recompute_values(options.recompute),
    }


def _parallel_values(
    sizes: ParallelSizes, options: BuildOptions, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the part of `_common_values` that divides a model over ranks, and raise its errors."""
    sparse, cuda = "num_moe_experts" in own, torch.cuda.is_available()
    uneven = sizes.ep > 1 and sizes.expert_tp > 1
    dispatcher = options.dispatcher or ("allgather" if uneven and not cuda else "alltoall")
    if sparse and options.variable_lengths and dispatcher == "allgather":
        raise LayoutError("micro-batches of variable lengths need the alltoall dispatcher")
    sequence_parallel = options.sequence_parallel
    # Of latent attention without it, Megatron-Core 0.16.1 has wrong gradients of shared parts.
    needed = (sparse or "kv_lora_rank" in own) and sizes.tp > 1
    if sequence_parallel is None:
        sequence_parallel = needed
    if needed and not sequence_parallel:
        raise LayoutError(
            f"models with {'experts' if sparse else 'latent attention'} need sequence_parallel "
            f"where tp is more than 1, and tp is {sizes.tp}; say sequence_parallel: true, or leave "
            "it out"
        )
    further = own.get("mtp_num_layers", 0)
    return {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        "pipeline_model_parallel_layout": _layout(sizes, own["num_layers"], further),
        "context_parallel_size": options.context_parallel,
        "expert_model_parallel_size": sizes.ep,
        "expert_tensor_parallel_size": sizes.expert_tp,
        "sequence_parallel": sequence_parallel and sizes.tp > 1,
        "moe_token_dispatcher_type": dispatcher,
    }


def _num_mtp_layers(config: Config, sizes: ParallelSizes, options: BuildOptions) -> int:
    """Return the number of MTP layers.

    Raises:
        ConfigError: the model has none.
        LayoutError: the options do not allow MTP layers.
    """
    for pp, kind in ((1, ConfigError), (sizes.pp, LayoutError)):
        if why := why_not_built(config, pp):
            raise kind(why)
    if options.te:
        raise LayoutError("layers that predict further tokens need the local layer spec, not te")
    return num_mtp_layers(table_of(config))


def _check_shared_rows(config: Mapping[str, Any], tp: int, options: BuildOptions) -> None:
    """Raise `LayoutError` unless ranks can share the rows of the model with these options."""
    further = {"mtp": options.mtp, "te": options.te}
    if taken := [name for name, value in further.items() if value]:
        raise LayoutError(
            f"{taken[0]} is for ranks with whole rows, and context_parallel is "
            f"{options.context_parallel}; leave one of them out"
        )
    if why := why_not_shared(config, options.context_parallel, tp):
        raise LayoutError(why)


def _check_grouped(
    config: Mapping[str, Any],
    values: Mapping[str, Any],
    sizes: ParallelSizes,
    options: BuildOptions,
) -> None:
    """Raise `LayoutError` unless the experts can be computed in grouped products."""
    kind = config["model_type"]
    if "num_moe_experts" not in values:
        raise LayoutError(f"grouped_experts is for models with experts; {kind} has none here")
    if values.get("add_bias_linear"):
        raise LayoutError(f"experts of {kind} have biases; they cannot be grouped")
    # PyTorch's grouped product needs rows that begin at multiples of 16 bytes.
    width = values["moe_ffn_hidden_size"] // sizes.expert_tp
    for size in (values["hidden_size"], width):
        if size * options.dtype.itemsize % 16:
            raise LayoutError(
                f"grouped_experts: {size} numbers of {options.dtype} in a row are no multiple of "
                "16 bytes; leave it out, or use a smaller etp"
            )


def _layout(sizes: ParallelSizes, num_layers: int, further: int) -> list[list[str]] | None:
    """Return Megatron-Core's pipeline layout: the parts of the model in each chunk.

    The layout is always explicit, so that ownership is what `ParallelSizes` says. None if there is
    only one stage.

    Args:
        further: number of MTP layers.

    Raises:
        LayoutError: the layers do not divide over the stages.
    """
    if sizes.pp == 1:
        return None
    chunks = [["decoder"] * len(layers) for layers in sizes.chunks(num_layers)]
    chunks[0].insert(0, "embedding")
    chunks[-1] += [*["mtp"] * further, "loss"]
    return chunks


def _expert_values(options: BuildOptions) -> dict[str, Any]:
    """Return Megatron-Core's settings of router and experts, for models that have experts."""
    coefficient = options.aux_loss_coeff
    return {
        "moe_router_load_balancing_type": "aux_loss" if coefficient else "none",
        "moe_aux_loss_coeff": coefficient,
        "moe_z_loss_coeff": options.z_loss_coeff,
        "moe_grouped_gemm": options.te and options.grouped_experts,
        "moe_enable_routing_replay": options.router_replay,
        "moe_router_dtype": "fp32",
    }


def _recompute_values(recompute: str) -> dict[str, Any]:
    """Return Megatron-Core's settings for `none`, `attention`, or else all layers recomputed."""
    if recompute == "none":
        return {}
    if recompute == "attention":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
