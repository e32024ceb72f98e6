"""`roll rollout`: a run file's samples, generated and scored, but not trained on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll.commands.launch import launch, print_end
from roll.commands.preflight import inspect
from roll.config.loading.compose import LoadedConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.lifecycle import CheckpointConfig
from roll.core.errors import ConfigError
from roll.distributed.processes.fork_server import ForkServer
from roll.pipeline.base import Pipeline
from roll.pipeline.rollout import RolloutPipeline

logger = logging.getLogger(__name__)

PIPELINES: Mapping[str, type[Pipeline[Any]]] = {
    "rlvr": RolloutPipeline,
    "agentic": RolloutPipeline,
}


def rollout(
    loaded: LoadedConfig, out: Path | None, steps: int | None, fork_server: ForkServer | None
) -> Path:
    """Generate and score the samples of a run, and return the folder with them.

    Args:
        out: folder to write; None: the run's output_dir with `-rollout` behind it.
        steps: number of steps; None: those of the run.
        fork_server: starts the workers.

    Raises:
        ConfigError: the pipeline generates nothing, or is to train on kept samples.
    """
    if unused := settings_of_training(loaded.config):
        logger.warning(
            "roll rollout does not use %s: it trains and validates nothing, and its own checkpoint "
            "after each step holds the position in the data alone",
            ", ".join(unused),
        )
    loaded = replace(loaded, config=rollout_config(loaded.config, out, steps))
    for finding in inspect(loaded):
        raise finding.error
    print_end(loaded.config, launch(loaded, PIPELINES, fork_server))
    return Path(loaded.config.output_dir)


def settings_of_training(config: RunConfig) -> list[str]:
    """Return the keys of a run file that `roll rollout` replaces, and that say something else than
    their defaults."""
    fields = type(config.checkpoint).model_fields
    keys = [f"checkpoint.{name}" for name in config.checkpoint.changed(*fields)]
    return keys + ["validation"] * (config.validation != type(config.validation)())


def rollout_config(config: RunConfig, out: Path | None, steps: int | None) -> RlvrBase:
    """Return the config of a run that only makes samples; arguments and errors as in `rollout`."""
    if config.pipeline not in PIPELINES:
        raise ConfigError(
            f"pipeline: roll rollout takes {' and '.join(PIPELINES)}, whose steps begin with "
            f"samples of engines; {config.pipeline} is another one"
        )
    assert isinstance(config, RlvrBase)
    if not config.generates:
        raise ConfigError(
            "rollout.replay: roll rollout generates the samples; drop it (rollout.replay=null)"
        )
    folder = out or Path(config.output_dir.rstrip("/") + "-rollout")
    return config.model_copy(
        update={
            "output_dir": str(folder),
            "max_steps": steps or config.max_steps,
            "validation": type(config.validation)(),
            # A kill costs one step; a checkpoint is no more than the position in the data.
            "checkpoint": CheckpointConfig(every=1, keep_last=1, export_hf=False),
            "track": config.track.model_copy(update={"samples": "all"}),
        }
    )
