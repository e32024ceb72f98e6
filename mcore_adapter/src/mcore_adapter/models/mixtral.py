"""mixtral: every layer has experts."""

from __future__ import annotations

from mcore_adapter.convert.ops import Rename
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.models import llama
from mcore_adapter.models.common import (
    HF,
    MCORE,
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
    shape = shape_of(config, num_experts=num_experts_of(config))
    router = HF + "block_sparse_moe.gate.weight"
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=(
            *ends(shape),
            *norms(),
            *attention(),
            Param(op=Rename(MCORE + "mlp.router.weight", router)),
            *gated_mlp(
                MCORE + "mlp.experts.local_experts.@.",
                HF + "block_sparse_moe.experts.@.",
                names=("w1", "w3", "w2"),
            ),
        ),
        repeats=tied_output(shape),
        config=config,
    )


def fields(config: Config) -> Fields:
    """Every layer has experts; the chosen ones' probabilities add up to one."""
    return with_experts(
        llama.fields(config),
        experts=num_experts_of(config),
        width=config["intermediate_size"],
        topk=config["num_experts_per_tok"],
    )
