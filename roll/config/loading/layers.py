"""Layers of a config: files, presets and the command line, each put over the layers before it.

Mappings are merged; lists and scalars are replaced. A mapping that turns into another kind of thing
is replaced as a whole. The place where each key was set is kept beside the values, so that a
mistake is reported at the layer that made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.config.sections.optimizers.kinds import USUAL

ALTERNATIVES = ("fn", "worker", "model")
"""Keys of which a reward has exactly one; another one makes the reward a different one."""
USUAL_KINDS = {"optimizer": USUAL}
"""Key of a section whose `kind` may be left out -> the kind that is meant then."""
PLACEMENT = "pool"
"""Key with the pool of a role. The pool is not part of an algorithm."""
FOLLOW = "follow"
"""Key of a reference that has no pool, because it is a copy of the policy."""
PLACED = {PLACEMENT, FOLLOW}
"""Keys of which a role has one: it needs no pool from a preset then."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Content of one file or of the command line, with the place of each key."""

    content: dict[str, Any]
    places: Mapping[str, str]
    """Places by dotted key: file and line, or the command line."""

    @classmethod
    def of_value(cls, key: str, value: Any, place: str) -> Layer:
        """Return a layer with one key, whose value, with everything in it, has one place.

        Args:
            key: dotted key.
            value: plain value, with lists and mappings.
            place: text for error messages, such as `command line`.
        """
        content: Any = value
        for part in reversed(key.split(".")):
            content = {part: content}
        return cls(content, dict.fromkeys((key, *_keys_below(key, value)), place))


class Origins:
    """Places (file and line, or the command line) where each key was set last."""

    def __init__(self, main: Path) -> None:
        """Begin without places; `main` is the run file, which stands for keys without a place."""
        self._main = main
        self._places: dict[str, str] = {}

    def name(self, key: str, places: Mapping[str, str]) -> None:
        """Record the place of `key` from `places`; keys below it keep theirs."""
        if key in places:
            self._places[key] = places[key]

    def forget(self, key: str) -> None:
        """Remove `key` and everything below it."""
        for known in [k for k in self._places if k == key or k.startswith(f"{key}.")]:
            del self._places[known]

    def replace(self, key: str, places: Mapping[str, str]) -> None:
        """Replace the places of `key` and everything below it by those in `places`."""
        self.forget(key)
        self._places.update(
            {k: place for k, place in places.items() if k == key or k.startswith(f"{key}.")}
        )

    def where(self, key: str) -> str:
        """Return the place of `key` or of the nearest mapping around it; else the run file."""
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            place = self._places.get(".".join(parts[:end]))
            if place:
                return place
        return str(self._main)


def apply_layer(data: dict[str, Any], layer: Layer, origins: Origins) -> dict[str, Any]:
    """Return `data` with a layer over it, and record the places of the layer's keys in
    `origins`."""
    return merge_at("", data, layer.content, layer.places, origins)


def merge_at(
    at: str,
    base: Mapping[str, Any],
    over: Mapping[str, Any],
    places: Mapping[str, str],
    origins: Origins,
) -> dict[str, Any]:
    """Return `base`, the mapping at the key `at`, with the mapping `over` over it; neither is
    changed.

    A mapping of another kind than that in `base` replaces it.

    Args:
        at: dotted key; empty for the whole config.
        places: place of each key of `over`, by dotted key from the top of the config.
        origins: record of the places, which is updated.
    """
    if _becomes_another(at, base, over):
        origins.replace(at, places)
        return dict(over)
    merged = dict(base)
    for key, value in over.items():
        path = f"{at}.{key}" if at else key
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            origins.name(path, places)
            merged[key] = merge_at(path, old, value, places, origins)
        else:
            origins.replace(path, places)
            merged[key] = value
    return merged


def lay_preset(data: dict[str, Any], preset: Layer, origins: Origins) -> dict[str, Any]:
    """Return `data` with a preset over it, and record the places of its keys in `origins`.

    Parts that the preset sets lose their earlier settings. A part is a key of the second level,
    such as `algorithm.loss`, `critic.warmup_steps` or `rollout.filters`. The pool of a role stays
    as it was; the preset's pool is used only if there is none.
    """
    content: dict[str, Any] = {}
    for section, parts in preset.content.items():
        assert isinstance(parts, dict), f"{section}: a preset sets parts of mappings"
        there = data.get(section)
        known = dict(there) if isinstance(there, dict) else {}
        content[section] = {
            k: v for k, v in parts.items() if k != PLACEMENT or not known.keys() & PLACED
        }
        for key in content[section]:
            known.pop(key, None)
            origins.forget(f"{section}.{key}")
        data = data | {section: known}
    return apply_layer(data, Layer(content, preset.places), origins)


def give_pools_to_roles(data: dict[str, Any], replaced: Layer, origins: Origins) -> None:
    """Give the roles in `data` that files changed the pool that a replaced preset gave them, if
    they have none. The problem to report is then that the roles are not needed any more, not that
    they have no pool."""
    for section, parts in replaced.content.items():
        there = data.get(section)
        if isinstance(there, dict) and PLACEMENT in parts and not there.keys() & PLACED:
            there[PLACEMENT] = parts[PLACEMENT]
            origins.name(f"{section}.{PLACEMENT}", replaced.places)


def kind_of(at: str, section: Mapping[str, Any]) -> Any:
    """Return the kind of the section at the key `at`, also if it is left out; None if it has
    none."""
    return section.get("kind", USUAL_KINDS.get(at.rpartition(".")[2]))


def _becomes_another(at: str, base: Mapping[str, Any], over: Mapping[str, Any]) -> bool:
    """Return True if `over` makes the options of `base`, which is at the key `at`, meaningless,
    because it has another kind."""
    if "kind" in over and (before := kind_of(at, base)) is not None:
        return bool(over["kind"] != before)
    if (FOLLOW in over and PLACEMENT in base) or (PLACEMENT in over and FOLLOW in base):
        return True
    chosen = [key for key in ALTERNATIVES if over.get(key) is not None]
    before = [key for key in ALTERNATIVES if base.get(key) is not None]
    return bool(chosen and before) and not set(chosen) & set(before)


def _keys_below(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted key of everything within `value`, which is at `key`; items of lists have
    their number as key."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield f"{key}.{name}"
            yield from _keys_below(f"{key}.{name}", item)
