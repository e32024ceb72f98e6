"""Whether a name can be one on the Hugging Face hub, or only a path on this machine."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def has_hub_form(name: str) -> bool:
    """`org/name`, or a bare `name` such as gpt2."""
    return _HUB_NAME.fullmatch(name) is not None


def may_be_on_hub(name: str) -> bool:
    """Of the hub's form, and not inside a folder that exists here: `outputs/model` is a path."""
    inside_a_folder = "/" in name and Path(name).parent.is_dir()
    return has_hub_form(name) and not inside_a_folder


def is_cached(name: str) -> bool:
    """Whether the tokenizer of a model on the hub is on this machine already."""
    if not has_hub_form(name):
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
