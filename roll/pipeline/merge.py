"""A checkpoint, of whatever backend and layout, as one Hugging Face folder that loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from roll.algorithms.losses.text import TextLoss
from roll.config.compose import load_config
from roll.config.roles import Role
from roll.config.run import RunConfig
from roll.config.strategy import MegatronConfig
from roll.core.errors import CheckpointError, ConfigError
from roll.distributed.cluster import Placement
from roll.distributed.local import LocalLauncher
from roll.pipeline.checkpoint import STATE, write_folder
from roll.strategy.forward import PolicyHead, ScoreHead
from roll.workers.learner import LearnerWorker
from roll.workers.model import TrainWorker


def merge(source: Path, target: Path) -> None:
    """Write the trained model of a checkpoint, adapters added to its weights, and load it.

    One process does it, on the CPU: every checkpoint resumes on any number of ranks.

    Args:
        source: a checkpoint, or the `output_dir` of a run, whose newest one is taken.
        target: a folder that does not exist.

    Raises:
        CheckpointError: `source` has no complete checkpoint, or what was written does not load.
        ConfigError: `target` exists.
    """
    if target.exists():
        raise ConfigError(f"{target} exists; name a folder that does not, or remove it")
    checkpoint = _checkpoint(source)
    config = load_config(checkpoint / "config.yaml").config
    scores = config.pipeline == "reward_model"
    head: Any = ScoreHead() if scores else PolicyHead(1.0, 1024)
    with LocalLauncher() as launcher:
        learner = launcher.start(
            LearnerWorker,
            Placement(Role.ACTOR_TRAIN, pool="merge"),
            _in_one_process(config),
            config.train_model,
            head,
            TextLoss(),
            config.total_updates(),
        )
        learner.call(TrainWorker.load, checkpoint / Role.ACTOR_TRAIN)
        write_folder(target, lambda path: learner.call(TrainWorker.save_hf, path, merged=True))
    _verify(target, AutoModelForSequenceClassification if scores else AutoModelForCausalLM)
    Console(stderr=True).print(f"{checkpoint} is in {target}", highlight=False, soft_wrap=True)


def _checkpoint(source: Path) -> Path:
    if (source / STATE).is_file():
        return source
    folder = source / "checkpoints"
    complete = sorted(path for path in folder.glob("step_*") if (path / STATE).is_file())
    if not complete:
        raise CheckpointError(
            f"{source} is no complete checkpoint ({STATE} is missing), and no run with one "
            f"({folder} holds none)"
        )
    return complete[-1]


def _in_one_process(config: RunConfig) -> Any:
    """The role that trains, cut over nothing."""
    role = config.trained[Role.ACTOR_TRAIN]
    if isinstance(role.strategy, MegatronConfig):
        return role.model_copy(update={"strategy": MegatronConfig()})
    return role


def _verify(folder: Path, factory: Any) -> None:
    model, info = factory.from_pretrained(folder, output_loading_info=True)
    wrong = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if wrong:
        raise CheckpointError(f"{folder} was written, but does not load: {wrong[0]}")
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise CheckpointError(f"{folder} was written, but {broken[0]} is not finite")
