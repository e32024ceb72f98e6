"""`Replay`: groups that a run has kept in files, in place of generated ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from roll.config.rlvr_base import RlvrBase
from roll.core.errors import ConfigError, DataError
from roll.core.metrics import Metrics
from roll.core.timing import Timers
from roll.core.types import Prompt
from roll.data.datasets import Dataset
from roll.models.load import load_config, load_tokenizer
from roll.models.vocabulary import token_hash
from roll.output_dir.replay_folder import ReplayFolder, open_replay
from roll.output_dir.resume import rendering_moment, steps_left
from roll.rollout.types import Group
from roll.runtime.rollouts.kept_groups import groups_of
from roll.runtime.run_data import RunData


@dataclass(frozen=True)
class Replay:
    """Groups of kept samples; see `Rollouts`. There are no engines: nothing is validated, and
    weights go nowhere."""

    config: RlvrBase
    folder: ReplayFolder

    def collect(self, step: int, timers: Timers) -> tuple[list[Group], Metrics]:
        """Return the groups of a step in the order in which they were trained on or generated.

        Raises:
            DataError: the file is damaged or does not have the groups of a step.
        """
        with timers.timed("rollout"):
            groups = groups_of(self.folder.read(step), str(self.folder.files[step]))
            self._check(step, groups)
        return groups, Metrics()

    def _check(self, step: int, groups: list[Group]) -> None:
        """Raise DataError unless these are the groups of a whole step, and their tags have
        teachers."""
        data = self.config.data
        wanted = Counter({data.samples_per_prompt: data.prompts_per_step})
        found = Counter(len(group.samples) for group in groups)
        if found != wanted:
            raise DataError(
                f"{self.folder.files[step]}: expected {_sizes(wanted)}, found {_sizes(found)}; "
                "the file has been changed, let the run that keeps the samples write it again"
            )
        if self.config.teachers:
            taught = {tag for role in self.config.teachers.values() for tag in role.tags}
            for tag in {group.prompt.tag for group in groups} - taught:
                raise DataError(
                    f"{self.folder.files[step]}: samples have the tag {tag!r}, which no teacher "
                    f"takes (tags with a teacher: {', '.join(sorted(taught))})"
                )

    def take_rates(self) -> Metrics:
        """Return nothing: no reward is asked."""
        return Metrics()

    def trainer_busy(self) -> AbstractContextManager[None]:
        """Wait for nobody."""
        return nullcontext()

    def update_weights(self, version: int, *, verify: bool) -> None:
        """Do nothing: nobody generates."""

    def validate(self, step: int, asked_to_end: Callable[[], bool]) -> dict[str, float]:
        """Return nothing: there are no validation sets."""
        return {}

    def find_prompt(self, prompt_id: str) -> Prompt:
        """Raise DataError: no data is read, and kept prompts have no pictures to be looked up."""
        raise DataError(f"prompt {prompt_id}: a run that trains on kept samples reads no data")

    def state(self) -> dict[str, Any]:
        """Return nothing: the number of the step says which file is next."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing; `state` may be of a run that generated."""

    def close(self) -> None:
        """Do nothing."""


def load_replay(
    config: RlvrBase, steps: range | None = None, made_by: RlvrBase | None = None
) -> RunData[Prompt]:
    """Open the kept samples that a run trains on, and check that its model can; no data is read.

    Args:
        config: config of the run.
        steps: steps to train on; None: those that the run has not done yet.
        made_by: config with which the samples were made; None: that in their folder.

    Raises:
        CheckpointError: the checkpoint to resume from is not in the format of this version.
        ConfigError, DataError: see `open_replay`; or the samples are of another model.
    """
    tokenizer, moment = load_tokenizer(config.train_model), rendering_moment(config)
    folder = open_replay(config, steps_left(config) if steps is None else steps, made_by)
    origin, model = folder.origin, load_config(config.train_model).model_type
    advice = "let `roll rollout` make samples with the model of this run"
    if origin.tokenizer != token_hash(tokenizer):
        found = "made with another tokenizer, so its token ids mean other texts"
    elif origin.model_type != model:
        found = f"of a model of the kind {origin.model_type}, and model.path is a {model}"
    elif origin.pictures:
        found, advice = "of prompts with pictures, which the files do not hold", "generate"
    else:
        nothing: Dataset[Prompt] = Dataset((), (), "")
        return RunData(tokenizer, nothing, nothing, moment, replay=folder)
    raise ConfigError(f"rollout.replay: the samples of {folder.path} are {found}; {advice}")


def _sizes(groups: Counter[int]) -> str:
    """Return numbers of groups by their number of samples, as a text."""
    return " and ".join(f"{n} groups of {size} samples" for size, n in sorted(groups.items()))
