"""Rotary embeddings whose frequencies depend on how long rows are, in transformers.

transformers takes the longest row of a forward pass for all rows of the pass: with `longrope` one
row above the original length changes the numbers of shorter rows beside it, and with `dynamic` also
those of later passes. Engines do otherwise: vLLM computes all rows as long ones if rows may become
long, SGLang those of a batch that has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.core.errors import ConfigError

DYNAMIC, LONGROPE = "dynamic", "longrope"
"""Types of rotary embeddings that depend on the length of the whole row."""


def kinds_by_length(config: Any) -> dict[str, int]:
    """Return the types of rotary embeddings of a model that depend on the length of rows, each with
    the length, in tokens, up to which rows do not change it.

    Args:
        config: configuration of the language model.
    """
    names = ("rope_parameters", "max_position_embeddings")
    return kinds_in_file({name: getattr(config, name, None) for name in names})


def kinds_in_file(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the same as `kinds_by_length` for the values of a config.json, which may be in the
    form of earlier transformers; types whose length is not told there are left out."""
    text = values.get("text_config") or values
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    found: dict[str, int] = {}
    for each in (rope, *(kind for kind in rope.values() if isinstance(kind, Mapping))):
        kind = each.get("rope_type", each.get("type"))
        key = "original_max_position_embeddings"
        original = each.get(key) or text.get(key)
        if kind == DYNAMIC and text.get("max_position_embeddings"):
            found[DYNAMIC] = text["max_position_embeddings"]
        elif kind in (LONGROPE, "su") and original:
            found[LONGROPE] = original
    return found


def border(config: Any) -> int | None:
    """Return the number of tokens up to which rows go through passes of their own, apart from
    longer ones; None: all rows may share passes.

    Args:
        config: configuration of the language model.
    """
    return kinds_by_length(config).get(LONGROPE)


def check_rows(config: Any, lengths: Sequence[int]) -> None:
    """Check that the numbers of each row of a forward pass depend on that row alone.

    Args:
        config: configuration of the language model.
        lengths: number of tokens of each row.

    Raises:
        ConfigError: they depend on the other rows.
    """
    for kind, limit in kinds_by_length(config).items():
        longest, shortest = max(lengths), min(lengths)
        if longest <= limit or (kind == LONGROPE and shortest > limit):
            continue
        raise ConfigError(
            f"model type {config.model_type!r} has rotary embeddings of type {kind}, which change "
            f"above {limit} tokens for all rows of a forward pass, and one has rows of {shortest} "
            f"to {longest} tokens: log-probs would depend on the other rows. Limit rows to {limit} "
            "tokens (data.max_tokens; or data.max_prompt_tokens, sampling.max_new_tokens)"
        )
