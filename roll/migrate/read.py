"""Reading of a run file of another framework, with the files in its `defaults`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll.config.errors import ConfigError
from roll.config.loading.compose import read_layer
from roll.migrate.interpolation import Interpolation

_MOST_PARENTS = 4
"""Number of folders above a file in which a group of `defaults` is looked for."""


@dataclass(slots=True)
class SourceFile:
    """Content of a run file of another framework, merged and resolved."""

    path: Path
    tree: dict[str, Any] = field(default_factory=dict)
    """Settings; a value whose `${...}` has no value is an `Unresolved`."""
    places: dict[str, str] = field(default_factory=dict)
    """File and line of each key, by dotted key."""
    missing: list[str] = field(default_factory=list)
    """Entries of `defaults` whose file was not found."""
    referred: set[tuple[str, ...]] = field(default_factory=set)
    """Keys that some `${...}` refers to."""

    def where(self, path: tuple[str, ...]) -> str:
        """Return the place of a key, `line 3` or `envs.yaml:3`, or that of the nearest mapping
        around it."""
        for end in range(len(path), 0, -1):
            place = self.places.get(".".join(path[:end]))
            if place is not None:
                file, _, line = place.rpartition(":")
                return f"line {line}" if Path(file) == self.path else f"{Path(file).name}:{line}"
        return self.path.name

    def is_in_run_file(self, path: tuple[str, ...]) -> bool:
        """Return whether a key stands in the run file itself, or came there by a `${...}`."""
        return self.where(path).startswith("line ")


def read_file(path: Path) -> SourceFile:
    """Read a run file and the files in its `defaults`, and replace each `${...}`.

    Raises:
        ConfigError: the file cannot be read, is no valid YAML or no mapping; or `defaults` form a
            circle.
    """
    source = SourceFile(path)
    raw: dict[str, Any] = {}
    for content, places, under in _layers(path, (), (), source.missing):
        for key in reversed(under):
            content = {key: content}
        prefix = "".join(f"{key}." for key in under)
        source.places |= {f"{prefix}{key}": place for key, place in places.items()}
        raw = _merged(raw, content)
    interpolation = Interpolation(raw)
    source.tree = interpolation.resolved()
    source.referred = interpolation.referred
    return source


def _layers(
    path: Path, under: tuple[str, ...], chain: tuple[Path, ...], missing: list[str]
) -> Iterator[tuple[dict[str, Any], Mapping[str, str], tuple[str, ...]]]:
    """Yield content, places and key of each file that `defaults` of `path` name, and of `path`
    itself, which comes where `_self_` stands, or last.

    Args:
        under: keys below which the content belongs.
        chain: files that led to this one, outermost first.
        missing: entries whose file was not found; filled here.
    """
    real = path.resolve()
    if real in chain:
        raise ConfigError(f"{path}: defaults form a circle: " + " -> ".join(map(str, chain)))
    layer = read_layer(path, named_by=chain[-1] if chain else None)
    content = dict(layer.content)
    defaults = content.pop("defaults", [])
    listed = defaults if isinstance(defaults, list) else [defaults]
    told = False
    for entry in listed:
        if entry == "_self_":
            told = True
            yield content, layer.places, under
            continue
        name, package = _named(entry)
        if name is None:
            continue
        found = _find(path.parent, name)
        if found is None:
            missing.append(name)
            continue
        below = _package_of(entry, package, under)
        yield from _layers(found, below, (*chain, real), missing)
    if not told:
        yield content, layer.places, under


def _named(entry: Any) -> tuple[str | None, str | None]:
    """Return the file of an entry of `defaults`, without its ending, and its package (`@...`);
    None for entries that concern hydra itself, or that choose nothing."""
    if isinstance(entry, dict) and len(entry) == 1:
        group, option = next(iter(entry.items()))
        group = str(group).removeprefix("optional ").removeprefix("override ").lstrip("/")
        if group.startswith("hydra") or option is None:
            return None, None
        group, _, package = group.partition("@")
        return f"{group}/{option}", package or None
    if not isinstance(entry, str):
        return None, None
    name, _, package = entry.partition("@")
    return name.lstrip("/"), package or None


def _package_of(entry: Any, package: str | None, under: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys below which the file of an entry belongs: those of `@package`, or of its
    group (`model: big` -> `model`)."""
    if package == "_global_":
        return ()
    if package == "_here_":
        return under
    if package is not None:
        return (*under, *package.split("."))
    if isinstance(entry, dict):
        group = str(next(iter(entry))).removeprefix("optional ").strip("/")
        return (*under, *group.split("/"))
    return under


def _find(folder: Path, name: str) -> Path | None:
    """Return the file of an entry of `defaults`, beside the file or above it; None if none is
    there."""
    names = [name] if name.endswith((".yaml", ".yml")) else [f"{name}.yaml", f"{name}.yml"]
    bare = [each.lstrip("./") for each in names]
    for parent in (folder, *folder.resolve().parents[:_MOST_PARENTS]):
        for each in (*names, *bare, *(f"config/{one}" for one in bare)):
            if (parent / each).is_file():
                return parent / each
    return None


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` over it: mappings are merged, except those with `_override_: true`,
    and everything else is replaced."""
    found = dict(base)
    for key, value in over.items():
        old = found.get(key)
        if isinstance(value, dict) and value.get("_override_") is True:
            found[key] = {k: v for k, v in value.items() if k != "_override_"}
        elif isinstance(old, dict) and isinstance(value, dict):
            found[key] = _merged(old, value)
        else:
            found[key] = value
    return found
