"""A YAML file plus overrides -> one validated config.

Rules: `defaults: [a.yaml, ../b.yaml]` lists files, left to right, relative to the file that names
them; the file itself wins. Mappings merge, lists and scalars replace. A mapping whose `kind`
changes (or a reward that turns from `fn` to `worker`) is replaced whole, so one backend never
inherits another's options. `name: null` drops an inherited reward, pool, teacher or validation
set.
`${a.b}` interpolates.
`algorithm.preset` lays a file of the package under all of it.
`key.sub=value` overrides win over everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from roll.config.errors import ConfigError, nearest
from roll.config.explain import Origins, describe
from roll.config.pipelines import PIPELINES
from roll.config.run import RunConfig

PRESETS = Path(__file__).parent / "presets"
"""One YAML file per preset: what lies under a run file whose `algorithm.preset` names it."""
NAMED = (("rewards",), ("pools",), ("teachers",), ("validation", "sets"))
"""Mappings from names that the user chooses."""
COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated config and where it came from."""

    config: RunConfig
    path: Path
    overrides: tuple[str, ...]


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read, compose and validate a run file.

    Raises:
        ConfigError: everything found wrong, each with its file, line, key and value.
    """
    path = Path(path)
    data, origins = compose(path, overrides)
    name = data.get("pipeline", "rlvr")
    if name not in PIPELINES:
        raise ConfigError(
            f"{origins.where('pipeline')}: pipeline = {name!r}: unknown"
            f"{nearest(str(name), PIPELINES)} (known: {', '.join(PIPELINES)})"
        )
    model = PIPELINES[name]
    try:
        # Through JSON, strict mode takes strings for enums and lists for tuples, and nothing else.
        config = model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise ConfigError(describe(error, model, data, origins)) from None
    return LoadedConfig(config, path, tuple(overrides))


def compose(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Origins]:
    """The merged, interpolated but unvalidated mapping, and where each key was set."""
    origins = Origins(path)
    files = list(_files(path, ()))
    changes = [(*_parse_override(override), override) for override in overrides]
    preset = _named_preset(
        [content for _, content, _ in files] + [_nested(keys, value) for keys, value, _ in changes]
    )
    if preset is not None:
        files.insert(0, _read_preset(preset))
    data: dict[str, Any] = {}
    for file, content, lines in files:
        data = _merge(data, content)
        origins.add_file(file, lines)
    for keys, value, override in changes:
        _set(data, keys, value, override)
        origins.add(".".join(keys), COMMAND_LINE)
    _drop_nulls(data)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(data), resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        message = str(error).splitlines()[0]
        raise ConfigError(f"{origins.where(key)}: {key}: {message}") from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}, origins


def _named_preset(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """`algorithm.preset`, from the last of the parts that sets it."""
    named = None
    for part in parts:
        algorithm = part.get("algorithm")
        if isinstance(algorithm, dict) and "preset" in algorithm:
            named = algorithm["preset"]
    return named if isinstance(named, str) else None


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def _read_preset(name: str) -> tuple[Path, dict[str, Any], dict[str, int]]:
    known = {file.stem: file for file in sorted(PRESETS.glob("*.yaml"))}
    if name not in known:
        raise ConfigError(
            f"algorithm.preset = {name!r}: unknown{nearest(name, known)} (known: "
            f"{', '.join(known)})"
        )
    return known[name], *_read(known[name], named_by=None)


def _files(
    path: Path, chain: tuple[Path, ...]
) -> Iterator[tuple[Path, dict[str, Any], dict[str, int]]]:
    """`path` after everything its `defaults` name, depth first."""
    path = Path(path)
    real = path.resolve()
    if real in chain:
        loop = " -> ".join(str(p) for p in (*chain, real))
        raise ConfigError(f"{path}: defaults form a cycle: {loop}")
    content, lines = _read(path, named_by=chain[-1] if chain else None)
    defaults = content.pop("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(d, str) for d in defaults):
        raise ConfigError(
            f"{path}:{lines.get('defaults', 1)}: defaults = {defaults!r}: must be a list of files"
        )
    for name in defaults:
        yield from _files(path.parent / name, (*chain, real))
    yield path, content, lines


def _read(path: Path, *, named_by: Path | None) -> tuple[dict[str, Any], dict[str, int]]:
    """Content of one YAML file and the line of every key."""
    by = f" (named in defaults of {named_by})" if named_by else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        raise ConfigError(f"{path}: no such file{near}{by}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read{by}: {error}") from None
    lines: dict[str, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _collect_lines(node, "", lines, path)
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a mapping of keys to values, is {content!r:.60}")
    return {str(key): value for key, value in content.items()}, lines


def _collect_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            line = key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"{path}:{line}: {name}: set twice, first in line {lines[name]}")
            lines[name] = line
            _collect_lines(value, f"{name}.", lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[f"{prefix}{index}"] = item.start_mark.line + 1
            _collect_lines(item, f"{prefix}{index}.", lines, path)


def _drop_nulls(data: Mapping[str, Any]) -> None:
    """Take out what `name: null` drops from mappings whose keys are the user's own."""
    for path in NAMED:
        node: Any = data
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            for name in [name for name, value in node.items() if value is None]:
                del node[name]


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    if "kind" in over and "kind" in base and over["kind"] != base["kind"]:
        return dict(over)
    if any(one in over and other in base for one, other in (("fn", "worker"), ("worker", "fn"))):
        return dict(over)
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _parse_override(text: str) -> tuple[list[str], Any]:
    key, equals, raw = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {text!r} must read key.sub=value")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={raw}"]), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        message = str(error).splitlines()[0]
        raise ConfigError(f"override {text!r}: the value is not valid YAML: {message}") from None
    assert isinstance(value, dict)
    return keys, value["x"]


def _set(data: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    """Set `data[keys] = value`; list items by number, a changed `kind` empties its mapping."""
    node: Any = data
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                there = ".".join(keys[:depth])
                raise ConfigError(f"override {override!r}: {there} has items 0 to {len(node) - 1}")
            index: Any = int(key)
        elif isinstance(node, dict):
            index = key
        else:
            there = ".".join(keys[:depth])
            raise ConfigError(f"override {override!r}: {there} is {node!r}, it has no {key!r}")
        if not last:
            if isinstance(node, dict) and not isinstance(node.get(index), dict | list):
                node[index] = {}
            node = node[index]
        elif key == "kind" and isinstance(node, dict) and node.get("kind") != value:
            node.clear()
            node["kind"] = value
        elif (
            isinstance(node, dict) and isinstance(value, dict) and isinstance(node.get(index), dict)
        ):
            node[index] = _merge(node[index], value)
        else:
            node[index] = value
