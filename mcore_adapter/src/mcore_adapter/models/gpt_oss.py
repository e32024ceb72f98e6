"""gpt_oss: experts stacked in one tensor, gate and up interleaved, biases, attention sinks."""

from __future__ import annotations

from mcore_adapter.convert.ops import FormatOp, Rename, Transpose, Unweave
from mcore_adapter.convert.shards import Replicated, Sharded, ShardRule
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models import llama
from mcore_adapter.models.common import (
    HF,
    MCORE,
    attention,
    ends,
    norms,
    num_experts_of,
    same,
    shape_of,
    tied_output,
)
from mcore_adapter.models.fields import Config, Fields, expect, with_experts


def table(config: Config) -> ModelTable:
    shape = shape_of(config, num_experts=num_experts_of(config))
    biased = bool(config.get("attention_bias", True))
    sinks = MCORE + "self_attention.core_attention.softmax_offset", HF + "self_attn.sinks"
    ours, theirs = MCORE + "mlp.experts.local_experts.@.", HF + "mlp.experts."

    def stacked(op: FormatOp, shard: ShardRule) -> Param:
        return Param(op=op, shard=shard, stacked=True)

    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=(
            *ends(shape),
            *norms(),
            *attention(qkv_bias=biased, out_bias=biased),
            same(*sinks, Sharded()),
            same(MCORE + "mlp.router.weight", HF + "mlp.router.weight"),
            same(MCORE + "mlp.router.bias", HF + "mlp.router.bias"),
            stacked(Unweave(ours + "linear_fc1.weight", theirs + "gate_up_proj"), Sharded(0, 2)),
            stacked(Unweave(ours + "linear_fc1.bias", theirs + "gate_up_proj_bias"), Sharded(0, 2)),
            stacked(Transpose(ours + "linear_fc2.weight", theirs + "down_proj"), Sharded(dim=1)),
            stacked(Rename(ours + "linear_fc2.bias", theirs + "down_proj_bias"), Replicated()),
        ),
        repeats=tied_output(shape),
        config=config,
    )


def fields(config: Config) -> Fields:
    """gpt_oss: sinks, biases everywhere, clamped gates, every other layer in a window."""
    expect(config, "swiglu_alpha", 1.702)
    expect(config, "attention_bias", True)
    base = llama.fields({**config, "attention_bias": False})
    return with_experts(
        Fields(
            config={
                **base.config,
                "add_bias_linear": True,
                "softmax_type": "learnable",
                # `hidden_act` says silu; what is computed is x * sigmoid(1.702 x).
                "activation_func": "quick_gelu",
                "activation_func_clamp_value": config.get("swiglu_limit", 7.0),
                "glu_linear_offset": 1.0,
            },
            rope_width=base.rope_width,
        ),
        experts=num_experts_of(config),
        width=config["intermediate_size"],
        topk=config["num_experts_per_tok"],
    )
