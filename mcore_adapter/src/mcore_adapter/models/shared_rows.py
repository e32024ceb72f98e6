"""Models whose rows ranks can share (context parallelism), and those whose rows can be packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_adapter.models import fields_of
from mcore_adapter.models.fields import Fields

_MIXERS = {
    "gated_delta_net": "gated delta nets, which read a row from its beginning to its end",
    "dsa": "sparse attention, which chooses tokens of whole rows",
}
"""Attention that ranks with parts of a row cannot compute, by Megatron-Core's name, and why."""


def why_not_shared(config: Mapping[str, Any], cp: int, tp: int = 1) -> str | None:
    """Return the reason why `cp` ranks cannot share the tokens of a model's rows; None: they can.

    Args:
        config: `config.json` of the model.
        tp: number of tensor parallel ranks, which divide the heads before.

    Raises:
        UnknownModelError: there is no family for its `model_type`.
        ConfigError: a key is missing, or has a value that is impossible or cannot be built.
    """
    if cp == 1:
        return None
    fields = fields_of(config)
    variant = str(fields.config.get("experimental_attention_variant"))
    why = _MIXERS.get(variant) or (fields.vision and "pictures, whose positions have three axes")
    if why:
        return f"cp = {cp}: a {config['model_type']} has {why}; leave cp out"
    heads = fields.config["num_attention_heads"] // tp
    for groups in _groups(fields, heads * tp):
        groups = max(1, groups // tp)
        if heads % cp or (groups % cp and cp % groups):
            return (
                f"cp = {cp}: each tensor parallel rank has {heads} heads of queries and {groups} "
                f"of keys, which {cp} ranks cannot share evenly; choose a cp that divides both, or "
                "divides the first and is a multiple of the second"
            )
    return None


def why_not_packed(config: Mapping[str, Any]) -> str | None:
    """Return the reason why rows of a model cannot lie behind one another in one row, each by
    itself; None: they can. Attention ends where a row ends.

    Args:
        config: `config.json` of the model.

    Raises:
        UnknownModelError: there is no family for its `model_type`.
        ConfigError: a key is missing, or has a value that is impossible or cannot be built.
    """
    if fields_of(config).config.get("experimental_attention_variant") != "gated_delta_net":
        return None
    return (
        f"a {config['model_type']} has gated delta nets, which go on reading where a packed row "
        "ends"
    )


def _groups(fields: Fields, heads: int) -> set[int]:
    """Return the numbers of heads of keys that layers of a model have."""
    wide = fields.traits.global_heads
    found = {heads if fields.latent else fields.config.get("num_query_groups") or heads}
    return found if wide is None else found | {wide.groups}
