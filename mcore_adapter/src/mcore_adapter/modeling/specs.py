"""Layer specs: the modules of which a layer is made."""

from __future__ import annotations

from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mcore_adapter.errors import ConfigError
from mcore_adapter.modeling.attention import CoreAttention
from mcore_adapter.modeling.config import ModelConfig
from mcore_adapter.modeling.delta_net import delta_net
from mcore_adapter.modeling.experts import GroupedExperts, Router
from mcore_adapter.modeling.mla import LatentAttention, SparseAttention
from mcore_adapter.modeling.mtp import mtp_block_spec
from mcore_adapter.modeling.norm import LatentNorm, RMSNorm, WideKeyNorm, WideNorm
from mcore_adapter.modeling.traits import (
    LocallyRotated,
    NormedOutputLayer,
    NormedValues,
    ScaledOutputLayer,
)
from mcore_adapter.modeling.vision.model import DeepstackLayer
from mcore_adapter.models.fields import Traits

HAVE_TE: bool = gpt_layer_specs.HAVE_TE
"""True if Transformer Engine is installed."""


class BiasedOutput(RowParallelLinear):
    """Output projection with a bias in a model whose other linear layers have none."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class ExpertOutput(RowParallelLinear):
    """Second linear layer of an expert that has biases.

    Its output is a copy, because Megatron-Core adds the bias in place. Autograd refuses an in-place
    operation on a view of a custom function's input.
    """

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output, bias = super().forward(hidden)
        return output.clone(), bias


def block_spec(made: ModelConfig, layers: range) -> TransformerBlockSubmodules:
    """Return the specs of the given layers.

    Args:
        layers: numbers of the layers in the whole model.

    Raises:
        ConfigError: the model needs the local layer spec, but Transformer Engine is asked for.
    """
    config, traits = made.transformer, made.traits
    sparse, linear = _sparse_layers(config), _linear_layers(config)
    if made.te:
        _check_te(traits, linear)
    specs = []
    for layer in layers:
        if made.te:
            specs.append(_te_layer(config, sparse[layer]))
            continue
        spec = _local_layer(config, sparse[layer], traits, linear=linear[layer])
        _set_rotation(spec.submodules.self_attention, made, local=layer in traits.local_rope)
        if made.grouped and sparse[layer]:
            spec.submodules.mlp.submodules.experts.module = GroupedExperts
        if made.vision is not None and layer < made.vision.deepstack:
            spec.module = DeepstackLayer
        specs.append(spec)
    return TransformerBlockSubmodules(
        layer_specs=specs,
        layer_norm=gpt_layer_specs.TENorm if made.te else RMSNorm,
    )


def _set_rotation(attention: ModuleSpec, made: ModelConfig, *, local: bool) -> None:
    """Set the module of attention in a model whose kinds of layers are rotated differently.

    `local` is True for a layer with the frequencies of layers with windows.
    """
    rope = made.local_rope if local else made.rope
    if made.local_rope is None or rope is None:
        return
    heads = made.traits.global_heads
    if heads is not None:
        attention.module = NormedValues
        attention.params["heads"] = None if local else heads
    elif local:
        attention.module = LocallyRotated
    else:
        return
    attention.params["rope"] = rope


def mtp_spec(made: ModelConfig) -> MultiTokenPredictionBlockSubmodules:
    """Return the specs of the layers for multi-token prediction (MTP).

    They have attention, and experts if the model has any.
    """
    config = made.transformer
    layer = _local_layer(config, config.num_moe_experts is not None, made.traits, linear=False)
    if made.grouped:
        layer.submodules.mlp.submodules.experts.module = GroupedExperts
    return mtp_block_spec(layer, config.mtp_num_layers)


def _check_te(traits: Traits, linear: list[bool]) -> None:
    """Raise `ConfigError` if a model cannot be built of Transformer Engine's modules."""
    if any(linear):
        raise ConfigError("gated delta nets need the local layer spec")
    needed = [name for name, value in vars(traits).items() if value != getattr(Traits(), name)]
    if needed:
        raise ConfigError(f"layers of Transformer Engine have no {', '.join(needed)}; leave te out")


def _sparse_layers(config: TransformerConfig) -> list[bool]:
    """Return for each layer whether it has experts."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(config.num_layers)]
    return [bool(sparse) for sparse in frequency]


def _linear_layers(config: TransformerConfig) -> list[bool]:
    """Return for each layer whether it has a gated delta net instead of attention."""
    if config.experimental_attention_variant != "gated_delta_net":
        return [False] * config.num_layers
    return [bool(linear) for linear in config.linear_attention_freq]


def _te_layer(config: TransformerConfig, sparse: bool) -> ModuleSpec:
    """Return the layer spec of Transformer Engine; `sparse` is True for a layer with experts."""
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    if sparse:
        spec.submodules.mlp.submodules.router = Router
    return spec


def _local_layer(
    config: TransformerConfig, sparse: bool, traits: Traits, *, linear: bool
) -> ModuleSpec:
    """Return Megatron-Core's local layer spec, with norms and core attention of this package.

    Args:
        sparse: True for a layer with experts.
        linear: True for a layer with a gated delta net instead of attention.
    """
    assert not LocalSpecProvider().fuse_layernorm_and_linear()
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if linear:
        layer.self_attention = delta_net()
    elif config.multi_latent_attention:
        layer.self_attention.module = LatentAttention
        _set_attention(layer.self_attention.submodules, LatentNorm, traits)
        if config.experimental_attention_variant == "dsa":
            layer.self_attention.submodules.core_attention.module = SparseAttention
    else:
        _set_attention(layer.self_attention.submodules, RMSNorm, traits)
    if traits.output_norms:
        scaled = traits.global_heads is not None
        spec.module = ScaledOutputLayer if scaled else NormedOutputLayer
    if sparse:
        layer.mlp.submodules.router = Router
        if config.add_bias_linear:
            layer.mlp.submodules.experts.submodules.linear_fc2 = ExpertOutput
    return spec


def _set_attention(attention: Any, norm: type[RMSNorm], traits: Traits) -> None:
    """Set the submodules of attention that are this package's; `norm` is that of queries and
    keys."""
    attention.core_attention = ModuleSpec(
        module=CoreAttention, params={"query_growth": traits.query_growth}
    )
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(attention, name, IdentityOp) is not IdentityOp:
            setattr(attention, name, norm)
    if traits.wide_qk_norm:
        attention.q_layernorm, attention.k_layernorm = WideNorm, WideKeyNorm
    if traits.out_bias:
        attention.linear_proj = BiasedOutput
