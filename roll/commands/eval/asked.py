"""Arguments of `roll eval`, and the files and models that they name. This module imports no large
library, so that a misspelt name shows at once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from roll.commands.eval.models import Examinee, find_models
from roll.config.loading.question_sets import load_set, set_file
from roll.core.errors import ConfigError

T = TypeVar("T", int, float)
OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
"""Begin of an argument that is a setting and no model."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments and options of the command, as they were written."""

    arguments: tuple[str, ...]
    """Models, and settings `KEY=VALUE`."""
    sets: str
    out: Path
    checkpoints: str = ""
    engine: str = "vllm"
    temperatures: str = ""
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Files and models that the arguments name."""

    sets: Mapping[str, Path]
    """Name of a set -> its file."""
    overrides: Sequence[str]
    """Settings `KEY=VALUE`."""
    temperatures: tuple[float, ...]
    models: Sequence[Examinee]
    out: Path


def look_for(asked: Asked) -> Found:
    """Look for all that the command line names.

    Raises:
        ConfigError: a set, a model or a checkpoint does not exist, or a number is wrong.
    """
    out = asked.out.expanduser().absolute()
    sets = _files(asked.sets)
    for file in sets.values():
        if not file.is_file():
            load_set(file)  # its error says so
    given = [text for text in asked.arguments if OVERRIDE.match(text) and not Path(text).exists()]
    temperatures = _numbers("--temperature", asked.temperatures, float)
    steps = _numbers("--checkpoint", asked.checkpoints, int)
    named = [text for text in asked.arguments if text not in given]
    models = find_models(named, steps, out)
    if not models:
        raise ConfigError("no model is named; give a folder, a name on the hub, or a run")
    return Found(sets, given, temperatures, models, out)


def _files(sets: str) -> dict[str, Path]:
    """Return name -> file of the sets in a list such as `gsm8k,my.yaml`.

    Raises:
        ConfigError: there is none, a set does not exist, or two have one name.
    """
    found: dict[str, Path] = {}
    for name in filter(None, (part.strip() for part in sets.split(","))):
        file = set_file(name)
        if file.stem in found:
            raise ConfigError(
                f"--sets: {found[file.stem]} and {file} both have the name {file.stem!r}, which "
                "their results are kept under; rename one of the files"
            )
        found[file.stem] = file
    if not found:
        raise ConfigError("--sets names no set, such as gsm8k or my.yaml")
    return found


def _numbers(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Return the numbers of a list such as `0,0.6`; ConfigError unless they are different numbers
    from 0 on."""
    found: list[T] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            number = kind(part)
        except ValueError:
            number = kind("-1")
        if not (number >= 0 and math.isfinite(number)) or number in found:
            raise ConfigError(f"{option} {text}: expected different numbers such as 1,2")
        found.append(number)
    return tuple(found)
