"""Checks that find mistakes before anything heavy is imported or started.

`roll check` prints the findings; `roll run` stops at the first one. Imports neither torch nor ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from roll.commands.checks.further_layers import check_further_layers
from roll.commands.checks.homes import check_homes
from roll.commands.checks.import_paths import Call, check_import_path
from roll.commands.checks.model_config import config_of
from roll.commands.checks.output_folder import check_output_folder, check_resume
from roll.commands.checks.shared_models import check_shared
from roll.commands.memory.plan import check_fit, devices_of
from roll.commands.memory.sizes import stored_elements
from roll.commands.memory.weight_files import check_weights
from roll.config.agentic_base import AgenticBase
from roll.config.errors import ConfigError, UserError
from roll.config.frozen import frozen_names
from roll.config.loading.compose import LoadedConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.engines import SglangConfig, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamW8bitConfig
from roll.config.sections.rollout import CustomFilterConfig
from roll.config.sections.services.judge import UrlJudgeConfig
from roll.core.errors import NotMadeYetError
from roll.core.hub import may_be_on_hub, require_hub, similar_folder
from roll.data.sources import check_source
from roll.distributed.device_layout import address_to_join, plan_layout
from roll.distributed.profilers import find_nsys
from roll.envs.adapters.table import adapter_of
from roll.envs.loading import check_env, load_env
from roll.envs.tools.passages import read_passages
from roll.models.kernels.rotary import kinds_in_file
from roll.output_dir.replay_folder import open_replay
from roll.output_dir.resume import check_optimizer, check_writable, steps_left
from roll.output_dir.trackers import check_trackers
from roll.output_dir.upload import check_urls
from roll.platform.machine import missing_for_compile, this_machine
from roll.rewards.api import RewardContext
from roll.rewards.judge.scoring import check_judged
from roll.rewards.loading import load_reward
from roll.rewards.service.client import find_key
from roll.strategy.available import EIGHT_BIT, check_engine
from roll.strategy.installed import check_backend
from roll.strategy.sglang import supported_arguments as sglang
from roll.strategy.vllm import supported_arguments as vllm
from roll.strategy.vllm.cpu_limits import check_model


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that would stop `roll run`."""

    error: UserError
    only_here: bool
    """True if the config is correct but this machine lacks something (an engine, a GPU, a made
    file)."""


def inspect(loaded: LoadedConfig, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return all problems with the files, models, engines, devices and import paths of a config."""
    config = loaded.config
    try:
        check_homes(config)
    except UserError as error:
        return [Finding(error, only_here=False)]
    # Each backend once, and SGLang once for each Python that it is to be found in.
    backends = {
        (role.strategy.kind, getattr(role.strategy, "python", None) or ""): role.strategy
        for role in config.roles.values()
    }
    checks: list[tuple[Callable[[], object], bool]] = [
        *((partial(check_source, source), False) for source in config.sources),
        *((check, False) for check in _check_user_code(config, user_folder(loaded))),
        *((partial(_check_model, *named), False) for named in _models(config)),
        *((partial(check_weights, key, model.path), True) for key, model in config.models.items()),
        *((partial(_check_frozen, role), False) for role in _trained_models(config)),
        *((check, False) for check in check_shared(config)),
        (partial(check_further_layers, config), False),
        (partial(_check_long_rows, config), False),
        *((check, False) for check in _check_corpora(config)),
        *((check, True) for check in _check_keys(config, environ)),
        *((partial(check_backend, backends[key]), True) for key in sorted(backends)),
        *((check, True) for check in _check_optimizers(config)),
        *((check, True) for check in _check_profiler(config)),
        (partial(_check_engine_arguments, config), False),
        (partial(_check_devices, config, environ), True),
        (partial(_check_without_gpu, config, environ), True),
        (partial(_check_compiler, config, environ), True),
        (partial(_check_memory, config, environ), config.cluster.memory_gb is None),
        (partial(check_trackers, config.track), True),
        (partial(_check_replay, config), False),
        (partial(_check_output, loaded), False),
        (partial(check_urls, config), True),
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


def _check_output(loaded: LoadedConfig) -> None:
    """Raise UserError if the run cannot write `output_dir`, would spoil what is in it, or cannot go
    on from what is in it. A folder that cannot be made is not looked into."""
    config = loaded.config
    check_writable(Path(config.output_dir).expanduser().absolute())
    check_output_folder(loaded)
    check_resume(config)
    check_optimizer(config)


def user_folder(loaded: LoadedConfig) -> Path:
    """Return the folder of the YAML file, whose modules a config may name."""
    return loaded.path.resolve().parent


def _models(config: RunConfig) -> Iterator[tuple[str, str, str | None]]:
    """Yield (key, path, `made_by`) of each model, and of each tokenizer that has its own path."""
    for key, model in config.models.items():
        yield key, model.path, model.made_by
        if model.tokenizer is not None:
            yield f"{key}.tokenizer", model.tokenizer, None


def _check_model(key: str, name: str, made_by: str | None) -> None:
    """Raise unless `name` is the folder of a checkpoint, or could be a model on the hub.

    Args:
        key: key in the config, for the message.
        name: folder, or name on the hub.
        made_by: command that makes the folder; None if the config names none.

    Raises:
        NotMadeYetError: the folder does not exist, and `made_by` would make it.
        ConfigError: it is no folder of a checkpoint, and no possible name on the hub; or it is
            similar to a folder here, not in the hub's cache, and the hub does not answer.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        known = ("config.json", "tokenizer.json", "tokenizer_config.json")
        if not any((path / file).exists() for file in known):
            raise ConfigError(f"{key}: {name} is no Hugging Face checkpoint: no config.json in it")
        return
    if path.exists():
        raise ConfigError(f"{key}: {name} is a file; expected the folder of a checkpoint")
    if made_by is not None:
        raise NotMadeYetError(f"{key}: {name} does not exist yet; make it with: {made_by}")
    if not may_be_on_hub(name):
        raise ConfigError(
            f"{key}: {name} does not exist; give the folder of a Hugging Face checkpoint, or "
            "`org/name` on the hub"
        )
    if similar_folder(name) is not None:  # a slip, more likely than a model that is not here yet
        require_hub(name)


def _trained_models(config: RunConfig) -> Iterator[ModelConfig]:
    """Yield the models of which something is trained."""
    for role in config.trained.values():
        yield role.model or config.train_model


def _check_frozen(model: ModelConfig) -> None:
    """Raise ConfigError if `model.freeze` names parameters that the model's files do not have.

    Nothing is checked of a model whose files are not on this machine.
    """
    stored = stored_elements(model)
    if stored:
        frozen_names(stored, model.freeze)


def _check_long_rows(config: RunConfig) -> None:
    """Raise ConfigError if rows of the policy may be so long that its engine computes them, or
    shorter ones, otherwise than its trainer. A model that is not on this machine is not looked
    at."""
    if not isinstance(config, RlvrBase):
        return
    model, longest = config.train_model, config.max_sequence_tokens
    values = config_of(model)
    # transformers keeps what is given under the older key under the newer one.
    newer = {"rope_scaling": "rope_parameters"}
    overrides = {newer.get(key, key): value for key, value in model.overrides.items()}
    for kind, limit in kinds_in_file({**(values or {}), **overrides}).items():
        if longest > limit:
            raise ConfigError(
                f"model.path: {model.path} has rotary embeddings of type {kind}, which engines and "
                f"trainers compute in different ways if rows may have more than {limit} tokens; "
                f"here they may have {longest}, prompt and response together. Lower "
                "data.max_prompt_tokens and sampling.max_new_tokens (for agents "
                "data.max_episode_tokens), also those of validation"
            )


def _check_corpora(config: RunConfig) -> Iterator[Callable[[], object]]:
    """Yield a check for the file of each corpus, which raises ConfigError if it is missing or
    empty, or its first line has no passage."""
    if not isinstance(config, AgenticBase) or not config.generates:
        return
    for corpus in config.corpora.values():
        yield partial(read_passages, Path(corpus.path), corpus.text, corpus.title, limit=1)


def _check_user_code(config: RunConfig, folder: Path) -> Iterator[Callable[[], object]]:
    """Yield a check for each tracker, function of a source, reward, environment and custom filter.

    A check is a function that raises ConfigError if its import path or its arguments cannot work.
    It reads files of the user and imports nothing of them. Built-in rewards are checked, too.

    Args:
        config: config of any pipeline; only RLVR runs have more than trackers and sources.
        folder: folder of the YAML file, in which modules are searched first.
    """
    for i, tracker in enumerate(config.track.trackers):
        if ":" in tracker.kind:
            key = f"track.trackers.{i}.kind"
            call = Call(1, tuple(tracker.kwargs), method="__init__")
            yield partial(check_import_path, key, tracker.kind, folder, call)
    for source in config.sources:
        if source.fn is not None:
            key = f"{source.path}: fn"
            yield partial(check_import_path, key, source.fn, folder, Call(given=1))
    if not isinstance(config, RlvrBase) or not config.generates:
        return
    for name, reward in config.rewards.items():
        if reward.judge is not None:
            yield partial(check_judged, name, reward)
        for kind, path in (("fn", reward.fn), ("worker", reward.worker)):
            if path is None:
                continue
            key = f"rewards.{name}.{kind}"
            if kind == "worker" or ":" in path:
                call = Call(1, tuple(reward.kwargs), supplied=("ctx",))
                if kind == "worker":
                    call = Call(1, tuple(reward.kwargs), method="setup")
                yield partial(check_import_path, key, path, folder, call)
            else:
                yield partial(load_reward, path, reward.kwargs, RewardContext(name, seed=0))
    if isinstance(config, AgenticBase):
        for name, environment in config.environments.items():
            where = f"environments.{name}"
            call = Call(0, tuple(environment.kwargs), method="__init__")
            if environment.agent is not None:
                call = Call(1, tuple(environment.kwargs))
                yield partial(check_import_path, f"{where}.agent", environment.agent, folder, call)
                continue
            env = environment.what
            yield partial(check_env, where, environment)
            if adapter_of(env) is not None or environment.python is not None:
                continue  # another interpreter may have other modules
            if ":" in env:
                yield partial(check_import_path, f"{where}.env", env, folder, call)
            else:
                yield partial(load_env, name, environment)
    for filters, choices in config.filters.items():
        for i, choice in enumerate(choices):
            if isinstance(choice, CustomFilterConfig):
                key = f"{filters}.{i}.fn"
                call = Call(1, tuple(choice.kwargs))
                yield partial(check_import_path, key, choice.fn, folder, call)


def _check_keys(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Callable[[], object]]:
    """Yield a check for the key of each service, which raises ConfigError if the key is missing."""
    if not isinstance(config, RlvrBase) or not config.generates:
        return
    for name, judge in config.judges.items():
        if isinstance(judge, UrlJudgeConfig):
            yield partial(find_key, f"judges.{name}", judge, environ)
    for name, reward in config.rewards.items():
        if reward.remote is not None:
            yield partial(find_key, f"rewards.{name}.remote", reward.remote, environ)


def _check_replay(config: RunConfig) -> None:
    """Raise UserError if the run is to train on kept samples and cannot; whether its model reads
    their tokens, only the run looks."""
    if isinstance(config, RlvrBase) and not config.generates:
        open_replay(config, steps_left(config))


def _check_optimizers(config: RunConfig) -> Iterator[Callable[[], object]]:
    """Yield a check for the package that an optimizer needs beside PyTorch."""
    if any(isinstance(role.optimizer, AdamW8bitConfig) for role in config.trained.values()):
        yield partial(check_engine, "adamw_8bit", EIGHT_BIT)


def _check_profiler(config: RunConfig) -> Iterator[Callable[[], object]]:
    """Yield a check for the program that `profile` needs."""
    if config.profile is not None and config.profile.kind == "nsys":
        yield find_nsys


def _check_compiler(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if layers are to be compiled here, and this machine has no compiler. Of
    machines of a cluster that exists already, nothing is known."""
    if address_to_join(config.cluster, environ) is not None:
        return
    platform = config.cluster.platform
    gpus = this_machine().gpus > 0 if platform == "auto" else platform == "cuda"
    compiled = {
        f"{key}.compile": "leave out compile"
        for key, model in config.models.items()
        if model.compile
    }
    if not gpus:
        compiled |= {
            f"{name}.strategy.enforce_eager": "leave out enforce_eager"
            for name, role in config.roles.items()
            if isinstance(role.strategy, VllmConfig) and not role.strategy.eager_on("cpu")
        }
    if compiled and (missing := missing_for_compile(gpus, environ)):
        key, instead = next(iter(compiled.items()))
        raise ConfigError(f"{key}: torch.compile cannot be used: {missing}, or {instead}")


def _check_engine_arguments(config: RunConfig) -> None:
    """Raise ConfigError for an entry of `engine_args` that the engine of the role does not take."""
    for role in config.roles.values():
        if isinstance(role.strategy, VllmConfig):
            vllm.check_arguments(role.strategy.engine_args)
        if isinstance(role.strategy, SglangConfig):
            sglang.check_arguments(role.strategy.engine_args, role.strategy.python)


def _check_memory(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a device cannot hold what its roles are estimated to need."""
    check_fit(config, devices_of(config, environ))


def _check_devices(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if this machine lacks devices of the pools and the run joins no cluster."""
    # The machines of a cluster that already exists are known only after Ray has connected to it.
    if address_to_join(config.cluster, environ) is None:
        plan_layout(config.cluster, config.pools, this_machine(), joined=False)


def _check_without_gpu(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the policy's engine needs a GPU for what is asked of it, and the run is
    to be on this machine, which has none. A model that is not here yet is not looked at."""
    if not isinstance(config, RlvrBase) or not isinstance(config.actor_infer.strategy, VllmConfig):
        return
    if not config.generates:
        return
    if address_to_join(config.cluster, environ) is not None or this_machine().gpus:
        return
    model = config_of(config.train_model)
    if model is None:
        return
    dtype = config.actor_infer.dtype or config.train_model.dtype
    check_model(config.actor_infer.strategy, model, dtype)
