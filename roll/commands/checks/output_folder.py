"""Checks that a run will not overwrite or move what is not its own in `output_dir`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll.config.errors import ConfigError
from roll.config.loading.compose import LoadedConfig, load_config, run_files
from roll.config.loading.written import run_file_text
from roll.config.run import RunConfig
from roll.output_dir.checkpoints import STATE, Checkpoints
from roll.output_dir.resume import LOCK
from roll.output_dir.summary import FILE
from roll.output_dir.upload import is_url

CONFIG = "config.yaml"
"""Name of the file in `output_dir` that a run writes its resolved config to."""
MARKS = frozenset({CONFIG, FILE, LOCK, "metrics.jsonl", "checkpoints", "fetched"})
"""Names of files and folders of which each run has one, however early it has ended."""
WRITTEN = ("output_dir", "data.cache", "track", "checkpoint")
"""Keys of what a run writes; the paths of all others are read."""


def check_output_folder(loaded: LoadedConfig) -> None:
    """Raise ConfigError if the run would overwrite a run file that the user has written, or if
    `resume: never` would move what is no earlier run, or what this run or another one needs."""
    folder = _folder(loaded.config)
    _check_config_file(loaded, folder)
    if loaded.config.resume == "never" and folder.is_dir():
        _check_move(loaded, folder)


def check_resume(config: RunConfig) -> None:
    """Raise ConfigError if `resume` is the path of something else than a complete checkpoint."""
    if config.resume in ("auto", "never") or is_url(config.resume):
        return
    path = Path(config.resume).expanduser()
    if not (path / STATE).is_file():
        beside = Checkpoints(_folder(config) / "checkpoints", config.checkpoint)
        raise ConfigError(f"resume: {beside.told_of_missing(path)}")


def _folder(config: RunConfig) -> Path:
    """Return the absolute path of `output_dir`."""
    return Path(config.output_dir).expanduser().absolute()


def _check_config_file(loaded: LoadedConfig, folder: Path) -> None:
    """Raise ConfigError if `config.yaml`, which the run writes, is a run file that it was loaded
    from, unless a run has written that."""
    written = folder / CONFIG
    if not written.is_file() or written.resolve() not in run_files(loaded.path):
        return
    if any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return
    if _is_resolved(written):  # by a session that has ended before its first step
        return
    raise ConfigError(
        f"output_dir: the run writes its resolved config to {written}, which is the run file or "
        "one of its defaults, so what you wrote there would be lost; name another output_dir, such "
        f"as {folder / 'out'}, or rename the file"
    )


def _is_resolved(file: Path) -> bool:
    """Return whether a run file is what a run writes of it."""
    try:
        config = load_config(file, import_code=False).config
    except ConfigError:
        return False
    return run_file_text(config) == file.read_text(encoding="utf-8")


def _check_move(loaded: LoadedConfig, folder: Path) -> None:
    """Raise ConfigError unless the folder can be renamed: it is empty, or an earlier run that holds
    nothing that this run reads and no run that may be under way."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(
            f"output_dir: resume: never would rename {folder}, {why}; name another output_dir, or "
            "move it out of there"
        )

    names = {path.name for path in folder.iterdir()}
    if names and not names & MARKS:
        raise refuse(f"which is no earlier run: it holds {', '.join(sorted(names)[:3])}")
    inside = folder.resolve()
    own = {inside / CONFIG}  # written by the earlier run, and again by this one
    for file in sorted(run_files(loaded.path) - own):
        if inside in file.parents:
            raise refuse(f"which holds the run file {file}")
    for lock in sorted(path for form in ("*", "*/*") for path in folder.glob(f"{form}/{LOCK}")):
        raise refuse(f"in which {lock.parent} is another run that may be under way ({LOCK})")
    for key, value in _texts(loaded.config.model_dump(mode="json"), ""):
        if key.startswith(WRITTEN):
            continue
        path = Path(value).expanduser().absolute()
        if _exists(path) and inside in path.resolve().parents:
            raise refuse(f"which holds {key}: {value}")


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of each text in the values of a config."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{key}.{number}")


def _exists(path: Path) -> bool:
    """Return whether a path is one of a file or folder; texts that cannot be paths are none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
