"""gpt_oss: experts stacked in one tensor, gate and up interleaved, biases, attention sinks."""

from __future__ import annotations

from mcore_adapter.convert.ops import Deinterleave, FormatOp, Rename, Transpose
from mcore_adapter.convert.shards import Replicated, Sharded, ShardRule
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models.common import HF, MCORE, attention, model_table, norms, same, shape_of
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.fields import Attention, Fields, expect, with_experts


def attention_of(config: Config) -> Attention:
    """Return the variant of attention for the table: with biases if `attention_bias` is true."""
    biased = config.flag("attention_bias")
    return Attention(qkv_bias=biased, out_bias=biased)


def table(config: Config) -> ModelTable:
    """Return the table of a model; Hugging Face stacks all experts of a layer in one tensor."""
    shape = shape_of(config, num_experts=config.count("num_local_experts"))
    hidden, width, experts = shape.hidden, config.count("intermediate_size"), shape.num_experts
    sinks = MCORE + "self_attention.core_attention.softmax_offset", HF + "self_attn.sinks"
    ours, theirs = MCORE + "mlp.experts.local_experts.@.", HF + "mlp.experts."

    def stacked(op: FormatOp, each: tuple[int, ...], shard: ShardRule) -> Param:
        return Param(op=op, shapes=(each,), shard=shard, stacked=True)

    first = Deinterleave(ours + "linear_fc1.weight", theirs + "gate_up_proj")
    first_bias = Deinterleave(ours + "linear_fc1.bias", theirs + "gate_up_proj_bias")
    second = Transpose(ours + "linear_fc2.weight", theirs + "down_proj")
    second_bias = Rename(ours + "linear_fc2.bias", theirs + "down_proj_bias")
    return model_table(
        config,
        shape,
        *norms(shape),
        *attention(shape, attention_of(config)),
        same(*sinks, (shape.num_heads,), Sharded()),
        same(MCORE + "mlp.router.weight", HF + "mlp.router.weight", (experts, hidden)),
        same(MCORE + "mlp.router.bias", HF + "mlp.router.bias", (experts,)),
        stacked(first, (hidden, 2 * width), Sharded(0, 2)),
        stacked(first_bias, (2 * width,), Sharded(0, 2)),
        stacked(second, (width, hidden), Sharded(dim=1)),
        stacked(second_bias, (hidden,), Replicated()),
    )


def fields(config: Config) -> Fields:
    """Return the fields of Megatron-Core's config: experts, sinks, all biases and clamped gates.

    Layers have sliding windows as `layer_types` says: without that key every other layer, the first
    one included (`windows`).

    Raises:
        ConfigError: the activation has another factor than 1.702, or attention has no biases.
    """
    expect(config, "swiglu_alpha", 1.702)
    expect(config, "attention_bias", True)
    # `add_bias_linear` covers the biases of attention, too.
    base = llama.dense_fields(config, Attention())
    return with_experts(
        Fields(
            config={
                **base.config,
                "add_bias_linear": True,
                "softmax_type": "learnable",
                # `hidden_act` says silu, but the model computes x * sigmoid(1.702 x).
                "activation_func": "quick_gelu",
                "activation_func_clamp_value": config["swiglu_limit"],
                "glu_linear_offset": 1.0,
            },
            rope_width=base.rope_width,
        ),
        experts=config["num_local_experts"],
        width=config["intermediate_size"],
        topk=config["num_experts_per_tok"],
    )
