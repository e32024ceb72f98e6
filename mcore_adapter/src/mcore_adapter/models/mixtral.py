"""mixtral: every layer has experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_adapter.convert.ops import Rename
from mcore_adapter.convert.table import ModelTable, Param
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


def table(config: Mapping[str, Any]) -> ModelTable:
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
