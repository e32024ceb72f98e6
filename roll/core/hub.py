"""Checks that distinguish model names on the Hugging Face hub from paths on this machine."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def has_hub_form(name: str) -> bool:
    """Return whether `name` is written as on the hub: `org/name`, or only `name`, such as gpt2."""
    return _HUB_NAME.fullmatch(name) is not None


def may_be_on_hub(name: str) -> bool:
    """Return whether `name` is written as on the hub and is not a path inside an existing folder:
    `outputs/model` is a path if the folder `outputs` exists."""
    inside_a_folder = "/" in name and Path(name).parent.is_dir()
    return has_hub_form(name) and not inside_a_folder


def is_cached(name: str) -> bool:
    """Return whether the tokenizer of a hub model is in the hub cache of this machine."""
    if not has_hub_form(name):
        return False
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
