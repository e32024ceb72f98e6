"""`roll merge`: a checkpoint of any backend and layout as one Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForSequenceClassification

from roll.algorithms.losses.text import TextLoss
from roll.config.loading.compose import load_config
from roll.config.offline import RewardModelConfig
from roll.config.run import RunConfig
from roll.config.sections.roles import Role
from roll.config.sections.strategy import Fsdp2Config, MegatronConfig
from roll.core.errors import CheckpointError, ConfigError
from roll.distributed.cluster import Placement
from roll.distributed.local import LocalLauncher
from roll.distributed.on_ray.environment import environment, on_one_machine
from roll.models.vision.parts import generating_class
from roll.output_dir.checkpoints import checkpoint_of, require_free, write_folder
from roll.strategy.hf_folder import is_further
from roll.strategy.training.heads import PolicyHead, ScoreHead
from roll.workers.learner import LearnerWorker
from roll.workers.model import TrainWorker


def merge(source: Path, target: Path, *, trust_remote_code: bool = False) -> None:
    """Write the trained model of a checkpoint, with adapters merged into its weights, and load it
    as a check.

    All work is done by one process on the CPU; this is possible because a checkpoint can be loaded
    on any number of ranks. Relative paths in the run's config are relative to the working
    directory, as in the run.

    Args:
        source: a checkpoint, or the `output_dir` of a run, whose newest checkpoint is used.
        target: folder to write, which must not exist.
        trust_remote_code: allow code in the model's folder to run if the checkpoint's config asks
            for it. The config in a checkpoint, unlike a run file, may come from somebody else.

    Raises:
        CheckpointError: `source` has no complete checkpoint, or the written model does not load or
            is not finite.
        ConfigError: `target` exists, or the checkpoint asks for code that is not allowed to run.
    """
    require_free(target)
    checkpoint = checkpoint_of(source)
    config = load_config(checkpoint / "config.yaml", import_code=trust_remote_code).config
    if config.train_model.trust_remote_code and not trust_remote_code:
        raise ConfigError(
            f"{checkpoint / 'config.yaml'} sets model.trust_remote_code, so code in the folder "
            f"{config.train_model.path!r} would be run; `roll merge --trust-remote-code` allows it"
        )
    _write_merged(checkpoint, config, target)
    Console(stderr=True).print(
        f"{checkpoint} is in {target}", markup=False, highlight=False, soft_wrap=True
    )


def _write_merged(checkpoint: Path, config: RunConfig, target: Path) -> None:
    """Load a checkpoint in one process on the CPU, write the merged model to `target`, and load
    that as a check."""
    scores = isinstance(config, RewardModelConfig)
    head: Any = ScoreHead() if scores else PolicyHead(1.0, 1024)
    with environment(on_one_machine()), LocalLauncher() as launcher:
        learner = launcher.start(
            LearnerWorker,
            Placement(Role.ACTOR_TRAIN, pool="merge"),
            _in_one_process(config),
            # Every device and every model has eager attention, and nothing is computed.
            config.train_model.model_copy(update={"attention": "eager", "compile": False}),
            head,
            TextLoss(),
            config.total_updates(),
        )
        learner.call(TrainWorker.load, checkpoint / Role.ACTOR_TRAIN)

        def write(path: Path) -> None:
            learner.call(TrainWorker.save_hf, path, merged=True)
            trusted = config.train_model.trust_remote_code
            check_written(path, scores=scores, trust_remote_code=trusted)

        write_folder(target, write)


def _in_one_process(config: RunConfig) -> Any:
    """Return the role that trains, without packing; fsdp2 and megatron get their default options,
    and so parallel sizes of 1, but for those that add layers to a model."""
    role = config.trained[Role.ACTOR_TRAIN].model_copy(update={"packing": False})
    match role.strategy:
        case Fsdp2Config():
            return role.model_copy(update={"strategy": Fsdp2Config()})
        case MegatronConfig(mtp_loss_weight=weight):
            return role.model_copy(update={"strategy": MegatronConfig(mtp_loss_weight=weight)})
    return role


def check_written(folder: Path, *, scores: bool = False, trust_remote_code: bool) -> None:
    """Load a written model.

    Layers that predict further tokens (MTP) are in the folder for engines; transformers has none.

    Args:
        scores: it is a reward model, and writes no text.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape or not finite.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    factory = AutoModelForSequenceClassification if scores else generating_class(config)
    model, info = factory.from_pretrained(
        folder, output_loading_info=True, trust_remote_code=trust_remote_code
    )
    text = model.config.get_text_config()
    strange = [name for name in info["unexpected_keys"] if not is_further(name, text)]
    wrong = [*info["missing_keys"], *strange, *info["mismatched_keys"]]
    if wrong:
        raise CheckpointError(f"what was written to {folder} does not load: {wrong[0]}")
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise CheckpointError(f"the checkpoint's {broken[0]} is not finite")
