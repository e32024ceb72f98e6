"""One table per model type: `table_of(config)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from mcore_adapter.convert.table import ModelTable
from mcore_adapter.errors import UnknownModelError
from mcore_adapter.models import (
    deepseek_v3,
    glm4_moe,
    gpt_oss,
    llama,
    mixtral,
    qwen2_moe,
    qwen3_next,
)

Maker = Callable[[Mapping[str, Any]], ModelTable]

TABLES: dict[str, Maker] = {
    "deepseek_v3": deepseek_v3.table,
    "glm4_moe": glm4_moe.table,
    "gpt_oss": gpt_oss.table,
    "llama": llama.table,
    "mistral": llama.table,
    "mixtral": mixtral.table,
    "qwen2": llama.table,
    "qwen2_moe": qwen2_moe.table,
    "qwen3": llama.table,
    "qwen3_moe": qwen2_moe.table,
    "qwen3_next": qwen3_next.table,
    "seed_oss": llama.table,
}
"""`model_type` in a `config.json` to its table. A new family is a file and a line here."""


def table_of(config: Mapping[str, Any]) -> ModelTable:
    """
    Args:
        config: the content of a `config.json`.

    Raises:
        UnknownModelError: there is no table for its `model_type`.
    """
    found = config.get("model_type")
    if found not in TABLES:
        near = get_close_matches(str(found), TABLES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownModelError(
            f"config.json: model_type {found!r} is not supported{hint}; known: {', '.join(TABLES)}"
        )
    return TABLES[found](config)
