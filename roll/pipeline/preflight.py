"""What can be known to be wrong before anything heavy is imported or started.

`roll check` prints it, `roll run` obeys it. No torch, no ray in here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from roll.config.compose import LoadedConfig
from roll.config.errors import ConfigError, UserError
from roll.config.pipelines import RlvrConfig
from roll.core.errors import NotMadeYetError
from roll.data.sources import check_source
from roll.distributed.layout import plan_layout
from roll.platform.machine import this_machine
from roll.strategy.available import check_engine


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `roll run` would stop at."""

    error: UserError
    only_here: bool
    """The config is fine; what is missing is on this machine (an engine, a GPU, a made file)."""


def inspect(loaded: LoadedConfig) -> list[Finding]:
    """Everything wrong with the files, models, engines, devices and import paths of a config."""
    config = loaded.config
    sources = [*config.data.sources, *config.validation.sets.values()]
    checks: list[tuple[Callable[[], object], bool]] = [
        *((partial(check_source, source), False) for source in sources),
        *((partial(_check_import_path, *named), False) for named in _import_paths(loaded)),
        *((partial(_check_model, *named), False) for named in _models(config)),
        *((partial(check_engine, kind), True) for kind in sorted(_backends(config))),
        (partial(_check_devices, config), True),
    ]
    found = []
    for check, only_here in checks:
        try:
            check()
        except NotMadeYetError as error:
            found.append(Finding(error, only_here=True))
        except UserError as error:
            found.append(Finding(error, only_here=only_here))
    unique = {str(finding.error): finding for finding in found}
    return list(unique.values())


def user_folder(loaded: LoadedConfig) -> Path:
    """The folder beside the YAML file, whose modules a config may name."""
    return loaded.path.resolve().parent


def _models(config: RlvrConfig) -> Iterator[tuple[str, str, str | None]]:
    named = {"model": config.model, "actor_train.model": config.actor_train.model}
    if config.reference is not None:
        named["reference.model"] = config.reference.model
    for key, model in named.items():
        if model is None:
            continue
        yield key, model.path, model.made_by
        if model.tokenizer is not None:
            yield f"{key}.tokenizer", model.tokenizer, None


def _check_model(key: str, name: str, made_by: str | None) -> None:
    path = Path(name).expanduser()
    if path.is_dir():
        known = ("config.json", "tokenizer.json", "tokenizer_config.json")
        if not any((path / file).exists() for file in known):
            raise ConfigError(f"{key}: {name} is no Hugging Face checkpoint: no config.json in it")
        return
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or path.parent.is_dir()
    if path.exists():
        raise ConfigError(f"{key}: {name} is a file; expected the folder of a checkpoint")
    if made_by is not None:
        raise NotMadeYetError(f"{key}: {name} does not exist yet; make it with: {made_by}")
    if looks_local:
        raise ConfigError(
            f"{key}: {name} does not exist; give the folder of a Hugging Face checkpoint, or "
            "`org/name` on the hub"
        )


def _import_paths(loaded: LoadedConfig) -> Iterator[tuple[str, str, Path]]:
    for name, reward in loaded.config.rewards.items():
        for kind, path in (("fn", reward.fn), ("worker", reward.worker)):
            if path is not None and ":" in path:
                yield f"rewards.{name}.{kind}", path, user_folder(loaded)


def _check_import_path(key: str, path: str, folder: Path) -> None:
    """Find the module without running it."""
    module, _, attribute = path.partition(":")
    if not module or not attribute.isidentifier():
        raise ConfigError(f"{key}: {path!r} must read 'package.module:name'")
    sys.path.insert(0, str(folder))
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    finally:
        sys.path.remove(str(folder))
    if not found:
        raise ConfigError(
            f"{key}: no module named {module!r}; looked beside the YAML file ({folder}) and on "
            "PYTHONPATH"
        )


def _backends(config: RlvrConfig) -> set[str]:
    kinds = {config.actor_train.strategy.kind, config.actor_infer.strategy.kind}
    return kinds | ({config.reference.strategy.kind} if config.reference else set())


def _check_devices(config: RlvrConfig) -> None:
    if config.cluster.address is None:
        plan_layout(config.cluster, config.pools, this_machine(), joined=False)
