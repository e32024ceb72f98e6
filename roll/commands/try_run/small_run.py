"""The small run of `roll try`: the settings of a run, with all that costs time made small."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from roll.config.agentic_base import AgenticBase
from roll.config.algorithm.advantages import PassKConfig
from roll.config.algorithm.shaping import OverlongPenaltyConfig
from roll.config.base import Config
from roll.config.frozen import parts_in
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.data import PicturesConfig
from roll.config.sections.engines import HfEngineConfig, SglangConfig, VllmConfig
from roll.config.sections.environment import BranchingConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import OPTIMIZERS
from roll.config.sections.rollout import RolloutConfig
from roll.config.sections.services.judge import JudgedConfig
from roll.config.sections.strategy import MegatronConfig
from roll.config.sections.training import CriticRole, FollowConfig
from roll.core.errors import ConfigError

ROWS = 20
"""Number of rows of each source; of one with a `part`, about this number in the part."""
SIBLINGS = 4
"""Number of samples of a prompt, or as many more as there are seats in an environment."""
LARGEST: Mapping[str, int] = {
    "extra_prompts": 0,
    "limit": ROWS,
    "max_new_tokens": 32,
    "max_turns": 4,
    "prompts_per_step": 2,
    "redundant_samples": 1,
    "rollouts_every": 1,
    "rows_per_step": 4,
    "samples_per_prompt": SIBLINGS,
    "seeds": ROWS,
    "workers": 1,
    # parallel layouts: one rank of each role
    "cp": 1,
    "ep": 1,
    "etp": 1,
    "pp": 1,
    "replicas": 1,
    "tp": 1,
    "ulysses": 1,
    "vpp": 1,
}
"""Key, wherever it stands -> largest value in the small run."""
REPLACED: Mapping[type[Config], Mapping[str, Any]] = {
    CriticRole: {"warmup_steps": 0},
    FollowConfig: {"every": 1, "decay": 0.5},
    RolloutConfig: {"replay": None},
    MegatronConfig: {
        "layers": None,
        "sequence_parallel": None,
        "mtp_loss_weight": None,
        "mtp_detached": True,
    },
    **{each: {"warmup_steps": 0, "warmup_ratio": 0.0} for each in OPTIMIZERS},
    OverlongPenaltyConfig: {"buffer_tokens": None, "max_tokens": None},
    VllmConfig: {"enforce_eager": None},
}
"""Class of a section -> settings that depend on sizes which are small here, or take longer than the
steps of the small run."""
CUT: Mapping[type[Config], Mapping[str, int]] = {
    BranchingConfig: {"whole": 2},
    PassKConfig: {"k": SIBLINGS - 1},
}
"""Class of a section -> largest values that depend on `SIBLINGS`."""
UNTOUCHED = (PicturesConfig, JudgedConfig)
"""Sections that stay as they are: of pictures, which cost nothing, and which pipelines without
pictures refuse; and of questions to judges, whose answers are unreadable if they are cut off."""
UNSET = ("limit", "rollouts_every")
"""Keys of `LARGEST` that are null without a limit, and get one here."""
LEARNED = ("equal_rewards", "mean_reward")
"""Kinds of filters that keep groups which only a model that can do something gives."""
NOISE = "noise"
"""Name of a reward that the small run has beside its own; if the run has one of this name, with a
`_` behind it. A model that has learned nothing gets equal rewards, with which no update would be
tried."""


@dataclass(eq=False)
class SmallRun:
    """A run made small. `config` is what runs; `told` says what differs from what was asked for."""

    config: RunConfig
    told: list[str] = field(default_factory=list)
    """What is not tried, in phrases."""


def small_run(
    config: RunConfig,
    output_dir: Path,
    shrink: Callable[[ModelConfig], Path],
    *,
    steps: int,
    own_engine: bool = False,
) -> SmallRun:
    """Return a small run with the settings of `config`: its data, templates, rewards, algorithm and
    training backends, but few rows, one rank of each role, float32 on the CPU, and small models.

    Args:
        output_dir: folder of the small run.
        shrink: function that returns the folder of a small model of the same family.
        steps: number of steps.
        own_engine: generate with the engine that the run names, not with `hf`.

    Raises:
        ConfigError: the settings are not valid in small.
    """
    told: list[str] = []
    values = json.loads(config.model_dump_json())
    _walk(config, values, shrink, told, own_engine=own_engine)
    if isinstance(config, RlvrBase):
        _tolerate_small_judges(config, values["rewards"], told)
    values["validation"]["stop"] = None
    if "samples_per_prompt" in values["data"]:
        values["data"]["samples_per_prompt"] = _siblings(config)
    values |= {
        "output_dir": str(output_dir),
        "max_steps": steps,
        "resume": "never",
        "stop_at": None,
        "profile": None,
        "cluster": values["cluster"]
        | {
            "platform": "cpu",
            "nodes": 1,
            "devices_per_node": len(config.pools),
            "address": "local",  # also where RAY_ADDRESS names a cluster
        },
        "pools": {name: str(number) for number, name in enumerate(config.pools)},
        "checkpoint": {"export_hf": False},
    }
    if isinstance(config, RlvrBase) and (config.rewards or isinstance(config, AgenticBase)):
        _tolerate_small_judges(config, values["rewards"], told)
        _add_noise(config, values["rewards"])
    values["track"] |= _tracking(config)
    values["validation"]["every"] = steps
    try:
        small = type(config).model_validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {first['msg']} (in the small run of `roll try`)") from None
    return SmallRun(small, list(dict.fromkeys(told)))


def _tracking(config: RunConfig) -> dict[str, Any]:
    """Return what the small run records otherwise: nothing outside of its folder, and no samples.
    Pipelines that generate none refuse settings of them."""
    told: dict[str, Any] = {"tensorboard": False, "trackers": []}
    if isinstance(config, RlvrBase):
        return told | {"samples": "none"}
    return told | {"rollouts_every": config.track.rollouts_every}


def _add_noise(config: RlvrBase, rewards: dict[str, dict[str, Any]]) -> None:
    """Add the reward `NOISE` to the plain values of the others, in place."""
    name = NOISE
    while name in config.rewards:
        name += "_"
    rewards[name] = {
        "fn": "roll.commands.try_run.noise:noise",
        "tags": sorted(_tags(config)),
        "weight": 0.01,
    }


def _tolerate_small_judges(
    config: RlvrBase, rewards: dict[str, dict[str, Any]], told: list[str]
) -> None:
    """Let rewards fail whose judge is a small model here, which gives no readable answers: make
    their values those of such rewards, in place. The answers are short, since nobody waits for
    what is in them.

    Args:
        rewards: name of a reward -> its plain values.
        told: gets what is left out.
    """
    for name, reward in config.rewards.items():
        if reward.judge is None or reward.judge.by not in config.cluster_judges:
            continue
        told.append(f"answers of the judge {reward.judge.by} (a small model has no readable ones)")
        rewards[name]["max_error_rate"] = 1.0
        rewards[name]["on_error"] = 0.0 if reward.on_error is None else reward.on_error
        _cut(rewards[name]["judge"], LARGEST)


def _siblings(config: RunConfig) -> int:
    """Return the number of samples of a prompt in the small run: a multiple of the seats of each
    environment, as that of the run is."""
    assert isinstance(config, RlvrBase)
    seats = 1
    if isinstance(config, AgenticBase):
        seats = math.lcm(*(each.seats for each in config.environments.values()))
    return min(config.data.samples_per_prompt, math.ceil(SIBLINGS / seats) * seats)


def _tags(config: RlvrBase) -> set[str]:
    """Return the tags for which the file has rewards, and those of its sources."""
    found = {tag for reward in config.rewards.values() for tag in reward.tags}
    return found | {source.tag for source in config.data.sources}


def _walk(
    config: Any,
    values: Any,
    shrink: Callable[[ModelConfig], Path],
    told: list[str],
    *,
    own_engine: bool,
) -> None:
    """Make the values of a part of the config small, in place.

    Args:
        config: the part: a section, a mapping or a sequence of them.
        values: the same as plain values.
        told: gets what is left out.
    """
    if values is None:  # left out here
        return
    if isinstance(config, ModelConfig):
        _small_model(config, values, shrink(config), told, own_engine=own_engine)
        return
    if isinstance(config, UNTOUCHED):
        return
    if isinstance(config, RolloutConfig) and config.replay is not None:
        told.append("rollout.replay (samples are generated)")
    if isinstance(config, MegatronConfig) and config.mtp_loss_weight is not None:
        told.append("layers that predict further tokens (mtp_loss_weight)")
    if isinstance(config, Config):
        _cut(values, LARGEST)
        values |= REPLACED.get(type(config), {})
        _cut(values, CUT.get(type(config), {}))
        for name in type(config).model_fields:
            inner = getattr(config, name)
            if name == "filters" and inner:
                values[name] = _filters(values[name], told)
            elif isinstance(inner, VllmConfig | SglangConfig) and not own_engine:
                values[name] = {"kind": HfEngineConfig().kind}
                told.append(f"{inner.kind} (the engine hf writes instead; --own-engine)")
            elif name == "samples_per_update":
                values[name] = None
            else:
                _walk(inner, values[name], shrink, told, own_engine=own_engine)
    elif isinstance(config, Mapping):
        for name, inner in config.items():
            _walk(inner, values[name], shrink, told, own_engine=own_engine)
    elif isinstance(config, tuple):
        for number, inner in enumerate(config):
            _walk(inner, values[number], shrink, told, own_engine=own_engine)


def _small_model(
    config: ModelConfig, values: dict[str, Any], small: Path, told: list[str], *, own_engine: bool
) -> None:
    """Make the values of a model those of the small one; the arguments are those of `_walk`.

    Args:
        small: folder of the small model.
    """
    values |= {
        "path": str(small),
        "dtype": "float32",
        "attention": _attention(config, small),
        "compile": False,
        "made_by": None,
        "overrides": {},  # the small model has them in its config.json
        "freeze": parts_in(config.freeze),
    }
    if config.compile:
        told.append("model.compile (compiling takes longer than these steps)")
    if len(config.freeze) > len(values["freeze"]):
        told.append("patterns of model.freeze (the small model has fewer layers)")
    if config.lora is not None and config.lora.serve == "adapter" and not own_engine:
        values["lora"]["serve"] = "merged"
        told.append("an adapter that is served as it is")


def _attention(config: ModelConfig, small: Path) -> str:
    """Return the attention kernel of a small model: that of the run, or one that a CPU has."""
    if config.attention in ("sdpa", "eager"):
        return config.attention
    from roll.models.kernels.attention import on_any_device
    from roll.models.load import load_config

    own = ModelConfig(path=str(small), trust_remote_code=config.trust_remote_code)
    return on_any_device(load_config(own))


def _cut(values: dict[str, Any], largest: Mapping[str, int]) -> None:
    """Cut the numbers of one section to what is largest."""
    for name, limit in largest.items():
        value = values.get(name)
        if name == "limit" and values.get("part") is not None:
            # Rows are counted before their part is known; as many have about ROWS in it.
            begin, end = values["part"]
            limit = math.ceil(ROWS / (end - begin))
        if isinstance(value, int) and not isinstance(value, bool):
            values[name] = min(value, limit)
        elif value is None and name in values and name in UNSET:
            values[name] = limit
    if values.get("seeds") is not None:
        values["limit"] = None  # which is for rows of files


def _filters(filters: list[dict[str, Any]], told: list[str]) -> list[dict[str, Any]]:
    """Return the filters that a model which has learned nothing may pass."""
    told += [f"the filter {each['kind']}" for each in filters if each["kind"] in LEARNED]
    return [each for each in filters if each["kind"] not in LEARNED]
