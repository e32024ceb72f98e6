"""Nodes of the YAML of a run file: the line of each key, and values that no run file may hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml
from yaml.constructor import SafeConstructor

from roll.config.errors import ConfigError

_TAGS = "tag:yaml.org,2002:"
_MERGE = f"{_TAGS}merge"
"""Tag of the key `<<`."""
_TIMESTAMP = f"{_TAGS}timestamp"
_KNOWN = {
    f"{_TAGS}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
}


class NodeLoader(yaml.SafeLoader):
    """Reader of nodes. Dates are texts, as for OmegaConf, which reads the values."""


NodeLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag != _TIMESTAMP]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def collect_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int], path: Path) -> None:
    """Write the line of each key below `node` into `lines`. A key that comes from a merge
    (`<<: *anchor`) has the line at which the merged mapping sets it.

    Args:
        node: YAML node; None for an empty file.
        prefix: key of the node with a dot, for the names of the keys below it.
        lines: key -> line, to be filled.
        path: file, for the error message.

    Raises:
        ConfigError: a key is set twice or is no text or number, or no run file may hold a value.
    """
    if node is not None and (why := unreadable(node)):
        at = f" {prefix.removesuffix('.')}:" if prefix else ""
        raise ConfigError(f"{path}:{node.start_mark.line + 1}:{at} {why}")
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            line = key.start_mark.line + 1
            if why := _no_key(key):
                raise ConfigError(f"{path}:{line}: {name}: {why}")
            if name in lines:
                raise ConfigError(f"{path}:{line}: {name}: set twice, first in line {lines[name]}")
            lines[name] = line
            collect_lines(value, f"{name}.", lines, path)
        for key, value in node.value:
            if key.tag == _MERGE:
                for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    merged: dict[str, int] = {}
                    collect_lines(mapping, prefix, merged, path)
                    lines |= merged | lines  # a key of the mapping itself wins
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[f"{prefix}{index}"] = item.start_mark.line + 1
            collect_lines(item, f"{prefix}{index}.", lines, path)


def unreadable(node: yaml.Node) -> str:
    """Return why a run file may not hold the value of a node, without what is below it; an empty
    text if it may."""
    kind = node.tag.removeprefix(_TAGS)
    if node.tag not in _KNOWN:
        tag = kind if kind.startswith("!") else f"!!{kind}"
        return (
            f"`{tag}` is no kind of value that a run file may hold; write a text, a number, true, "
            "false, null, a list or a mapping"
        )
    if isinstance(node, yaml.ScalarNode) and "\0" in node.value:
        return f"{node.value!r:.60} holds the character U+0000, which no path can have; remove it"
    try:
        if isinstance(node, yaml.ScalarNode):
            SafeConstructor().construct_object(node)
    except (ValueError, LookupError):  # a number of too many digits, or `!!int` before a text
        shown = repr(node.value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return f"{shown} cannot be read as `{kind}`; write it in quotes if it is a text"
    return _other_base(node, kind)


def _other_base(node: yaml.Node, kind: str) -> str:
    """Return why a number is not what its reader takes it for; an empty text if it is.

    YAML 1.1 reads `010` in base 8, and `1:30` in base 60. `0x10`, `0b11` and `1_000` say themselves
    what they are.
    """
    if not isinstance(node, yaml.ScalarNode) or kind not in ("int", "float"):
        return ""
    digits = node.value.lstrip("+-").replace("_", "")
    if ":" in digits:
        base, other = 60, "a time of a day with its date, such as 2030-01-31 18:00"
    elif digits.startswith("0") and digits.isdecimal() and int(digits) != int(digits, 8):
        base, other = 8, f"{int(digits)} for the decimal number"
    else:
        return ""
    value = SafeConstructor().construct_object(node)
    return (
        f"YAML reads {node.value} in base {base}, as {value}; write {value} if that is meant, "
        f"{other}, or put a text in quotes"
    )


def unreadable_below(node: yaml.Node | None) -> Iterator[str]:
    """Yield why a run file may not hold a value, for each such value in a node without keys of
    mappings; RecursionError if the node holds itself."""
    if node is None:
        return
    if why := unreadable(node):
        yield why
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if why := _no_key(key):
                yield why
            yield from unreadable_below(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from unreadable_below(item)


def _no_key(key: yaml.Node) -> str:
    """Return why a node can be no key; an empty text if it can.

    YAML reads `on`, `yes` and `no` as true and false, so that a name of the user would become
    `True`.
    """
    kind = key.tag.removeprefix(_TAGS)
    if kind not in ("bool", "null") or not isinstance(key, yaml.ScalarNode):
        return ""
    read = "null" if kind == "null" else "true or false"
    return f"YAML reads the key `{key.value}` as {read}; put it in quotes"
