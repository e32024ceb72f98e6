"""Models whose layers that predict further tokens (MTP) can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_adapter.models import table_of
from mcore_adapter.models.common import num_mtp_layers


def why_not_built(config: Mapping[str, Any], pp: int = 1) -> str | None:
    """Return the reason why the MTP layers of a model cannot be built; None: they can.

    Args:
        config: `config.json` of the model.
        pp: number of pipeline stages; the layers lie on the last one.

    Raises:
        UnknownModelError: there is no family for its `model_type`.
        ConfigError: a key is missing, or has an impossible value.
    """
    table = table_of(config)
    if not num_mtp_layers(table):
        return f"this {config['model_type']} has no layers that predict further tokens"
    if pp > 1 and table.shape.tied:
        return (
            "layers that predict further tokens have an embedding of their own on the last stage, "
            f"which cannot also be the tied output layer's; pp is {pp}, say 1"
        )
    return None
