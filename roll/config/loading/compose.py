"""The way from a YAML file and overrides to one validated config.

Layers: `defaults: [a.yaml, ../b.yaml]` lists files, left to right, relative to the file that names
them; the file itself wins over them. A file that several of them name is read once, at its first
place. Mappings are merged; lists and scalars are replaced. A mapping
whose `kind` changes (or a reward that changes from `fn` to `worker`) is replaced as a whole, so
that a backend never inherits the options of another one. `name: null` removes an inherited reward,
judge, pool, teacher, domain, environment, opponent, corpus or validation set, and null in place of
them all (`validation: null`) removes all. `${a.b}` is replaced by the value of the key `a.b`.

Presets: `algorithm.preset` puts a YAML file of the package under the layer that names the preset.
Settings of this layer and of later layers win over the preset. Settings of earlier layers for the
parts that the preset sets are dropped.

Overrides: `key.sub=value` are the last layer and win over everything. Their order matters only if
they set the same key. An override that replaces a mapping or a list is always applied before the
overrides of its parts.
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
from yaml.reader import ReaderError

from roll.config.errors import ConfigError, nearest
from roll.config.loading.explain import describe
from roll.config.loading.layers import Layer, Origins, apply_layer, give_pools_to_roles, lay_preset
from roll.config.loading.nodes import NodeLoader, collect_lines
from roll.config.loading.overrides import COMMAND_LINE, Change, in_order, parse_override, set_key
from roll.config.pipelines import config_class
from roll.config.run import RunConfig
from roll.config.user_code.own import importing

PRESETS = Path(__file__).parents[1] / "presets"
"""Folder of the presets, one YAML file each. A preset lies under the run file that names it."""
NAMED = (
    *((name,) for name in ("rewards", "judges", "pools", "teachers", "domains")),
    *((name,) for name in ("environments", "opponents", "corpora")),
    ("validation", "sets"),
)
"""Mappings whose keys are names that the user chooses."""
UNNAMED = object()
"""Value that stands for the preset of a layer that does not mention one; null is a valid
mention."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A validated config, with the path and the overrides that it was loaded from."""

    config: RunConfig
    path: Path
    overrides: tuple[str, ...]


def load_config(
    path: Path | str, overrides: Sequence[str] = (), *, import_code: bool = True
) -> LoadedConfig:
    """Read, compose and validate a run file.

    Parts that users bring are imported, from the folder of the file first.

    Args:
        import_code: False for a file that is only read and may be somebody else's: nothing is
            imported, and the options of users' parts are taken as they are.

    Raises:
        ConfigError: something is wrong; the text names every problem with file, line, key and
            value.
    """
    path = Path(path)
    data, origins = compose(path, overrides)
    name = data.get("pipeline", "rlvr")
    with importing(path.resolve().parent, allowed=import_code):
        try:
            model = config_class(str(name))
        except ConfigError as error:
            where = origins.where("pipeline")
            raise ConfigError(f"{where}: pipeline = {name!r}: {error}") from None
        try:
            # Read through JSON: strict mode then takes strings for enums and lists for tuples, and
            # accepts nothing else.
            config = model.model_validate_json(json.dumps(data))
        except ValidationError as error:
            raise ConfigError(describe(error, model, data, origins)) from None
    return LoadedConfig(config, path, tuple(overrides))


def run_files(path: Path) -> set[Path]:
    """Return the resolved paths of a run file and of all files that its `defaults` name; the errors
    are those of `compose`."""
    seen: set[Path] = set()
    for _ in _files(path, (), seen):
        pass
    return seen


def compose(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Origins]:
    """Merge the files, presets and overrides of a run, and replace each `${...}` by its value.

    Args:
        path: run file.
        overrides: `key.sub=value` from the command line.

    Returns:
        The config as plain values, not yet validated; and where each key was set last.

    Raises:
        ConfigError: a file is missing or no valid YAML, `defaults` form a cycle, a preset is
            unknown, or an override or a `${...}` cannot be read.
    """
    origins = Origins(path)
    files = list(_files(path, (), set()))
    changes = in_order([parse_override(override) for override in overrides])
    named = [_preset_named_by(layer.content) for layer in files]
    named.append(_preset_named_by_changes(changes))
    # Only the preset that is named last counts. Naming null, for no preset, counts as well.
    last = max((i for i, preset in enumerate(named) if preset is not UNNAMED), default=-1)
    replaced: list[Layer] = []
    data: dict[str, Any] = {}
    for i, layer in enumerate([*files, None]):
        if named[i] not in (UNNAMED, None):
            by = layer.places["algorithm.preset"] if layer else COMMAND_LINE
            preset = _read_preset(named[i], by)
            if i == last:
                data = lay_preset(data, preset, origins)
            else:
                replaced.append(preset)
        if layer is not None:
            data = apply_layer(data, layer, origins)
    for change in changes:
        set_key(data, change, origins)
    for preset in replaced:
        give_pools_to_roles(data, preset, origins)
    _drop_nulls(data)
    return _resolved(data, origins), origins


def _resolved(data: dict[str, Any], origins: Origins) -> dict[str, Any]:
    """Return `data` with each `${...}` replaced by its value; ConfigError if one has none."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(data), resolve=True)
    except OmegaConfBaseException as error:
        key = _dotted(error)
        message = str(error).splitlines()[0]
        raise ConfigError(f"{origins.where(key)}: {key}: {message}") from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _dotted(error: OmegaConfBaseException) -> str:
    """Return the key that an error is about, as `a.0.b`; OmegaConf writes `a[0].b`."""
    return (error.full_key or "").replace("[", ".").replace("]", "")


def _preset_named_by(content: Mapping[str, Any]) -> Any:
    """Return the preset that the content of a layer names; `UNNAMED` if it does not mention one."""
    algorithm = content.get("algorithm")
    return algorithm.get("preset", UNNAMED) if isinstance(algorithm, dict) else UNNAMED


def _preset_named_by_changes(changes: Sequence[Change]) -> Any:
    """Return the preset that the overrides name, the last one if several do; else `UNNAMED`."""
    named = UNNAMED
    for change in changes:
        if change.keys == ("algorithm",):
            found = _preset_named_by({"algorithm": change.value})
        else:
            found = change.value if change.keys == ("algorithm", "preset") else UNNAMED
        named = named if found is UNNAMED else found
    return named


def _read_preset(name: Any, by: str) -> Layer:
    """Return the layer of a preset. Problems in its settings are reported at the place `by`, which
    named the preset.

    Raises:
        ConfigError: there is no preset `name`.
    """
    known = {file.stem: file for file in sorted(PRESETS.glob("*.yaml"))}
    if not isinstance(name, str) or name not in known:
        raise ConfigError(
            f"{by}: algorithm.preset = {name!r}: unknown{nearest(str(name), known)} (known: "
            f"{', '.join(known)})"
        )
    layer = read_layer(known[name], named_by=None)
    lines = {key: place.rpartition("/")[2] for key, place in layer.places.items()}
    return Layer(layer.content, {key: f"{by} (preset {line})" for key, line in lines.items()})


def _files(path: Path, chain: tuple[Path, ...], seen: set[Path]) -> Iterator[Layer]:
    """Yield the layers of all files that `defaults` of `path` name, depth first, and `path` last.

    A file that several of them name comes once, at its first place: it is what they are made of,
    and must not undo what the first of them says.

    Args:
        chain: resolved paths of the files that led to this one, outermost first.
        seen: gets the resolved paths of the files.

    Raises:
        ConfigError: `defaults` form a cycle or are no list of files, or a file cannot be read.
    """
    path = Path(path)
    real = path.resolve()
    if real in chain:
        loop = " -> ".join(str(p) for p in (*chain, real))
        raise ConfigError(f"{path}: defaults form a cycle: {loop}")
    if real in seen:
        return
    seen.add(real)
    layer = read_layer(path, named_by=chain[-1] if chain else None)
    defaults = layer.content.pop("defaults", [])
    if not isinstance(defaults, list) or not all(isinstance(d, str) for d in defaults):
        raise ConfigError(
            f"{layer.places['defaults']}: defaults = {defaults!r}: must be a list of files"
        )
    for name in defaults:
        yield from _files(path.parent / name, (*chain, real), seen)
    yield layer


def read_layer(path: Path, *, named_by: Path | None) -> Layer:
    """Read one YAML file and the line of each of its keys.

    Args:
        named_by: file whose `defaults` name this one, for the message; None for the run file.

    Raises:
        ConfigError: the file is missing, cannot be read, is no valid YAML, or is no mapping.
    """
    by = f" (named in defaults of {named_by})" if named_by else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        raise ConfigError(f"{path}: no such file{near}{by}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: the byte 0x{error.object[error.start]:02X} is no UTF-8{by}; save the "
            "file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read{by}: {error}") from None
    lines: dict[str, int] = {}
    try:
        node = yaml.compose(text, Loader=NodeLoader)
        if node is not None and not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{path}:{node.start_mark.line + 1}: must be a mapping of keys to values, is a "
                f"{'list' if isinstance(node, yaml.SequenceNode) else 'single value'}"
            )
        collect_lines(node, "", lines, path)
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        found = f"U+{ord(text[error.position]):04X}"
        raise ConfigError(
            f"{path}:{line}: not valid YAML: the character {found}, which no YAML file may hold; "
            "remove it, or write it as an escape in double quotes"
        ) from None
    except OmegaConfBaseException as error:
        key = _dotted(error)
        at = f"{path}:{lines[key]}: {key}" if key in lines else str(path)
        raise ConfigError(f"{at}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(
            f"{path}: an alias (`*name`) stands inside of its own anchor, or values stand hundreds "
            "of levels deep in one another"
        ) from None
    assert isinstance(content, dict)
    places = {key: f"{path}:{line}" for key, line in lines.items()}
    return Layer({str(key): value for key, value in content.items()}, places)


def _drop_nulls(data: dict[str, Any]) -> None:
    """Remove entries with the value null from the mappings in `NAMED`, and null in place of one."""
    for path in NAMED:
        node: Any = data
        for key in path:
            if isinstance(node, dict) and key in node and node[key] is None:
                del node[key]
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict):
            for name in [name for name, value in node.items() if value is None]:
                del node[name]
