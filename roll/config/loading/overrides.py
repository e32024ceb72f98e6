"""Overrides of the command line: their order, and their application to a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from roll.config.errors import ConfigError
from roll.config.loading.layers import ALTERNATIVES, Layer, Origins, kind_of, merge_at
from roll.config.loading.nodes import NodeLoader, unreadable_below

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Change:
    """Override of the command line."""

    keys: tuple[str, ...]
    value: Any
    text: str
    """The override as the user wrote it."""

    @property
    def reward_choice(self) -> str:
        """The alternative of a reward (`fn`, `worker` or `model`) that this override sets, or sets
        a part of; empty for other overrides."""
        if len(self.keys) < 3 or self.keys[0] != "rewards" or self.keys[2] not in ALTERNATIVES:
            return ""
        return self.keys[2]


def in_order(changes: Sequence[Change]) -> list[Change]:
    """Return the overrides with those that replace or empty a mapping before those of its parts;
    otherwise the order stays."""
    ordered: list[Change] = []
    for change in changes:
        after = (i for i, other in enumerate(ordered) if _precedes(change, other))
        ordered.insert(next(after, len(ordered)), change)
    return ordered


def _precedes(one: Change, other: Change) -> bool:
    """Return True if `one`, applied after `other`, would undo it."""
    if other.keys == one.keys:
        return False
    if one.keys[-1] == "kind" and _is_below(other, one.keys[:-1]):
        return True
    if one.reward_choice and not other.reward_choice and _is_below(other, one.keys[:2]):
        return True
    return _is_below(other, one.keys)


def _is_below(change: Change, keys: tuple[str, ...]) -> bool:
    """Return whether the override sets a part of the mapping at `keys`, not the mapping itself."""
    return len(change.keys) > len(keys) and change.keys[: len(keys)] == keys


def parse_override(text: str) -> Change:
    """Parse `key.sub=value`; the value is read as YAML.

    Raises:
        ConfigError: the text has another form, or the value is not valid YAML.
    """
    key, equals, raw = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r} must read key.sub=value")
    shown = text if len(text) <= 100 else f"{text[:97]}..."
    try:
        node = yaml.compose(raw, Loader=NodeLoader)
        if why := next(unreadable_below(node), ""):
            raise ConfigError(f"override {shown!r}: {why}")
        if (rest := raw[node.end_mark.index if node else 0 :].strip()).startswith("#"):
            raise ConfigError(
                f"override {shown!r}: {rest!r} would be a comment of YAML and left out; put the "
                f"value in quotes: {key}='\"...\"'"
            )
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={raw}"]), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        message = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"override {shown!r}: the value is not valid YAML: {message}; put a text with such "
            f"characters in quotes: {key}='\"...\"'"
        ) from None
    except RecursionError:
        raise ConfigError(f"override {shown!r}: an alias stands inside of its own anchor") from None
    assert isinstance(value, dict)
    return Change(tuple(keys), value["x"], text)


def set_key(data: dict[str, Any], change: Change, origins: Origins) -> None:
    """Set one key in `data`, and record its place.

    Missing mappings around the key are made, also in place of a value that is neither list nor
    mapping. A number selects an item of a list. A mapping is merged into the one that is there. A
    `kind` that is new or changed empties its mapping. So does a change of a reward from one of its
    alternatives to another.

    Raises:
        ConfigError: the key leads through a list without such an item, or through an item of a list
            that is neither list nor mapping.
    """
    node: Any = data
    *around, last = change.keys
    for depth, key in enumerate(around):
        if depth == 2:
            _switch_reward_kind(node, change, origins)
        index = _index(node, change, depth)
        if isinstance(node, dict) and not isinstance(node.get(key), dict | list):
            node[key] = {}
            made = ".".join(change.keys[: depth + 1])
            origins.replace(made, {made: COMMAND_LINE})
        node = node[index]
    if len(around) == 2:
        _switch_reward_kind(node, change, origins)
    index = _index(node, change, len(around))
    key, value = ".".join(change.keys), change.value
    places = Layer.of_value(key, value, COMMAND_LINE).places
    if last == "kind" and isinstance(node, dict) and kind_of(".".join(around), node) != value:
        node.clear()
        origins.replace(".".join(around), {".".join(around): COMMAND_LINE})
    if isinstance(node, dict) and isinstance(value, dict) and isinstance(node.get(last), dict):
        origins.name(key, places)
        node[last] = merge_at(key, node[last], value, places, origins)
    else:
        origins.replace(key, places)
        node[index] = value


def _switch_reward_kind(reward: Any, change: Change, origins: Origins) -> None:
    """Empty a reward that a file sets and that this override changes to another alternative. If the
    command line sets two alternatives, both stay, and validation refuses them."""
    chosen, name = change.reward_choice, ".".join(change.keys[:2])
    if not chosen or not isinstance(reward, dict):
        return
    if change.value is None and len(change.keys) == 3:
        return
    before = [key for key in ALTERNATIVES if reward.get(key) is not None]
    if chosen in before or not any(key in reward for key in ALTERNATIVES):
        return
    if any(origins.where(f"{name}.{key}") == COMMAND_LINE for key in before):
        return
    reward.clear()
    origins.replace(name, {name: COMMAND_LINE})


def _index(node: Any, change: Change, depth: int) -> Any:
    """Return the part of the override's key at this depth: a number if `node` is a list, else a
    name.

    Args:
        node: list or mapping at the parts before it.
        depth: number of parts before it.

    Raises:
        ConfigError: the list has no such item, or `node` is neither list nor mapping.
    """
    key, there = change.keys[depth], ".".join(change.keys[:depth])
    if isinstance(node, list):
        if not (key.isascii() and key.isdecimal()) or int(key) >= len(node):
            raise ConfigError(f"override {change.text!r}: {there} has items 0 to {len(node) - 1}")
        return int(key)
    if not isinstance(node, dict):
        raise ConfigError(f"override {change.text!r}: {there} is {node!r}, it has no {key!r}")
    return key
