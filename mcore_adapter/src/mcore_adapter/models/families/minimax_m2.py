"""minimax_m2: norms over all heads of queries or keys together, and experts with sigmoid scores."""

from __future__ import annotations

from dataclasses import replace

from mcore_adapter.convert.ops import Rename
from mcore_adapter.convert.shards import Sharded
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models.common import (
    HF,
    MCORE,
    attention,
    gated_mlp,
    model_table,
    norms,
    same,
    shape_of,
)
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.fields import Attention, Fields, rope_parameters, with_experts


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights; the experts' matrices are named w1, w3 and w2."""
    shape = shape_of(config, num_experts=config.count("num_local_experts"))
    experts, sparse = shape.num_experts, HF + "block_sparse_moe."
    bias = Rename(MCORE + "mlp.router.expert_bias", sparse + "e_score_correction_bias")
    return model_table(
        config,
        shape,
        *norms(shape),
        *attention(shape, Attention()),
        *(
            same(
                f"{MCORE}self_attention.{x}_layernorm.weight",
                f"{HF}self_attn.{x}_norm.weight",
                (heads * shape.head_dim,),
                Sharded(),
            )
            for x, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads))
        ),
        same(MCORE + "mlp.router.weight", sparse + "gate.weight", (experts, shape.hidden)),
        Param(op=bias, shapes=((experts,),), keeps_dtype=True),
        *gated_mlp(
            shape,
            config.count("intermediate_size"),
            MCORE + "mlp.experts.local_experts.@.",
            sparse + "experts.@.",
            names=("w1", "w3", "w2"),
        ),
        # Each rank normalises its own heads, so no two ranks may share one.
        divisible={"num_key_value_heads": shape.num_kv_heads},
    )


def fields(config: Config) -> Fields:
    """Return fields with experts in every layer, chosen by sigmoid scores to which a correction is
    added, and the first `rotary_dim` dimensions of each head rotated."""
    base = llama.dense_fields(config, Attention()).but(wide_qk_norm=True)
    turned, told = config["rotary_dim"], config.keys() | rope_parameters(config).keys()
    if turned is not None and "partial_rotary_factor" not in told:
        base = replace(base, rope_width=turned)
    return with_experts(
        base,
        experts=config["num_local_experts"],
        width=config["intermediate_size"],
        topk=config["num_experts_per_tok"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        # The correction is a part of the checkpoint; post-training does not change it.
        moe_router_bias_update_rate=0.0,
    )
