"""Parameters that `model.freeze` names, by patterns or as parts of a model that reads pictures."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import get_args

from roll.config.errors import ConfigError, nearest
from roll.config.sections.model import ModelPart

_TOWER = "visual."
_PROJECTORS = ("visual.merger.", "visual.deepstack_merger_list.")
"""Beginnings of the names of modules that map patches to the width of the language model."""


def part_of(name: str) -> ModelPart:
    """Return the part that a parameter or module of a model that sees belongs to.

    Args:
        name: full name in a model with a head or in its checkpoint, such as
            `model.visual.merger.mlp.0.weight`.
    """
    inner = name.removeprefix("model.")
    if not inner.startswith(_TOWER):
        return "language"
    return "projector" if inner.startswith(_PROJECTORS) else "vision"


def parts_in(freeze: Iterable[str]) -> list[str]:
    """Return those values of `model.freeze` that are parts of a model, not patterns."""
    return [one for one in freeze if one in get_args(ModelPart)]


def frozen_names(names: Iterable[str], freeze: Iterable[str]) -> frozenset[str]:
    """Return those of a checkpoint's parameters that `model.freeze` leaves as they are.

    Args:
        names: names of all parameters, as in the Hugging Face checkpoint.
        freeze: parts, and patterns in which `*` stands for any text, dots included.

    Raises:
        ConfigError: a pattern fits no parameter, or all parameters are frozen.
    """
    known, chosen, found = list(names), list(freeze), set[str]()
    parts = parts_in(chosen)
    for pattern in (one for one in chosen if one not in parts):
        fits = [name for name in known if fnmatchcase(name, pattern)]
        if not fits:
            raise ConfigError(
                f"model.freeze: no parameter of the checkpoint fits {pattern!r}"
                f"{nearest(pattern, known, most=3)} (`*` stands for any text; a head that is the "
                "embedding has no name of its own)"
            )
        found.update(fits)
    found.update(name for name in known if part_of(name) in parts)
    if known and len(found) == len(set(known)):
        raise ConfigError(
            f"model.freeze: {', '.join(chosen)} are all parameters of the model, so nothing is "
            "trained"
        )
    return frozenset(found)


def frozen_tensors(
    tensors: Iterable[tuple[str, Iterable[str]]], frozen: frozenset[str]
) -> set[str]:
    """Return those tensors in memory that consist of frozen parameters only.

    Args:
        tensors: name of each tensor in memory, and names of the parameters in the checkpoint that
            it is made of.
        frozen: parameters that are frozen.

    Raises:
        ConfigError: only some of the parameters that a tensor is made of are frozen.
    """
    found = set()
    for name, made_of in tensors:
        stay = [one for one in made_of if one in frozen]
        move = [one for one in made_of if one not in frozen]
        if stay and move:
            raise ConfigError(
                f"model.freeze: {stay[0]} is frozen and {move[0]} is not, but the backend keeps "
                f"both in one tensor, {name}; freeze all {len(stay) + len(move)} parameters of it, "
                "or none"
            )
        if stay:
            found.add(name)
    return found
