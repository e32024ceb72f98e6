"""Text of a run file that is made of a config, and the values in such a text.

A run file may say `${key}` for the value of another key, and `\\${key}` for the text itself. The
values of a config are resolved, so a `${` in them is text, and is written with its backslash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import yaml

from roll.config.run import RunConfig

_PLAIN = re.compile(r"(\\*)\$\{")
_MARKED = re.compile(r"((?:\\\\)*)\\\$\{")


class RunFileDumper(yaml.SafeDumper):
    """Writer of YAML for run files, which are read by OmegaConf: it takes more texts for numbers
    than PyYAML, such as `1e-6`, and these are put in quotes."""


# As in OmegaConf's own reader, which has no public name.
RunFileDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
        |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


def in_one_line(value: Any, *, quotes: bool = False) -> str:
    """Return a value as YAML for a run file, in one line.

    Args:
        quotes: put texts in double quotes, which may hold any character.
    """
    text = yaml.dump(
        value,
        Dumper=RunFileDumper,
        default_flow_style=True,
        default_style='"' if quotes else None,
        width=float("inf"),
        allow_unicode=True,
        sort_keys=False,
    )
    return text.removesuffix("\n").removesuffix("\n...").strip()


def run_file_text(config: RunConfig) -> str:
    """Return the YAML text of all settings; read as a run file it gives the same config."""
    settings = _of_texts(json.loads(config.model_dump_json()), _mark)
    return yaml.dump(settings, Dumper=RunFileDumper, sort_keys=False)


def without_marks(settings: Any) -> Any:
    """Return the values that were written by `run_file_text`, as plain YAML reads them, without
    the backslashes before `${`."""
    return _of_texts(settings, _unmark)


def _of_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with each text in it, keys left alone, replaced by what `change` makes of
    it."""
    if isinstance(value, dict):
        return {key: _of_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_of_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def _mark(text: str) -> str:
    r"""Return a text with a backslash before each `${`; OmegaConf halves those before it."""
    return _PLAIN.sub(lambda found: rf"{found[1] * 2}\${{", text)


def _unmark(text: str) -> str:
    """Return the text of which `_mark` makes this one."""
    return _MARKED.sub(lambda found: rf"{found[1][: len(found[1]) // 2]}${{", text)
