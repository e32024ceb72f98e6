"""mixtral: every layer has experts."""

from __future__ import annotations

from mcore_adapter.convert.table import ModelTable
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
from mcore_adapter.models.fields import Attention, Fields, with_experts

ATTENTION = Attention()


def table(config: Config) -> ModelTable:
    """Return the table of the model's weights; the experts' matrices are named w1, w3 and w2."""
    shape = shape_of(config, num_experts=config.count("num_local_experts"))
    router = HF + "block_sparse_moe.gate.weight"
    return model_table(
        config,
        shape,
        *norms(shape),
        *attention(shape, ATTENTION),
        same(MCORE + "mlp.router.weight", router, (shape.num_experts, shape.hidden)),
        *gated_mlp(
            shape,
            config.count("intermediate_size"),
            MCORE + "mlp.experts.local_experts.@.",
            HF + "block_sparse_moe.experts.@.",
            names=("w1", "w3", "w2"),
        ),
    )


def fields(config: Config) -> Fields:
    """Return fields with experts in every layer.

    The probabilities of the chosen experts add up to one.
    """
    return with_experts(
        llama.dense_fields(config, ATTENTION),
        experts=config["num_local_experts"],
        width=config["intermediate_size"],
        topk=config["num_experts_per_tok"],
    )
