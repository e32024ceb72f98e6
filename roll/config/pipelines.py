"""Classes of the whole run file, by the value of `pipeline`."""

from __future__ import annotations

import inspect

from roll.config.agentic import AgenticConfig
from roll.config.errors import ConfigError, nearest
from roll.config.offline import DistillationConfig, DpoConfig, RewardModelConfig, SftConfig
from roll.config.rlvr import RlvrConfig
from roll.config.run import RunConfig
from roll.config.user_code.own import imported

PIPELINES: dict[str, type[RunConfig]] = {
    "rlvr": RlvrConfig,
    "agentic": AgenticConfig,
    "sft": SftConfig,
    "distill": DistillationConfig,
    "dpo": DpoConfig,
    "reward_model": RewardModelConfig,
}


def config_class(name: str) -> type[RunConfig]:
    """Return the class of a run file with this value of `pipeline`. A pipeline that the user brings
    is imported.

    Raises:
        ConfigError: there is no such pipeline, or it is not derived from one.
    """
    if ":" not in name:
        if name not in PIPELINES:
            raise ConfigError(
                f"unknown{nearest(name, PIPELINES)} (known: {', '.join(PIPELINES)}; or your own, "
                "my_module:MyPipeline)"
            )
        return PIPELINES[name]
    found = imported(name)
    if not inspect.isclass(found) or not hasattr(found, "prepare"):
        raise ConfigError(f"{name} is no class that derives from a pipeline of roll.extend")
    if missing := getattr(found, "__abstractmethods__", None):
        raise ConfigError(f"{name} has no method {', '.join(sorted(missing))}")
    made: object = getattr(found, "config_class", None)
    if not (isinstance(made, type) and issubclass(made, RunConfig)):
        raise ConfigError(f"{name}.config_class must derive from a config of roll.extend")
    return made
