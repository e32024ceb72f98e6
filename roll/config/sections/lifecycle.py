"""What a run leaves behind and how it looks after itself: validation, checkpoints, trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from pydantic import Field

from roll.config.base import Config
from roll.config.sections.data import PreferenceSource, SourceConfig, TaughtSource, TextSource
from roll.config.sections.sampling import SamplingConfig


def pass_ks(num_samples: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... up to the number of samples, and that number."""
    powers = {2**i for i in range(num_samples.bit_length())}
    return sorted(powers | {num_samples})


def score_names(num_samples: int) -> list[str]:
    """What is told of a validation set with this many samples of each prompt."""
    means = dict.fromkeys(["mean@1", f"mean@{num_samples}"])
    return [*means, *(f"pass@{k}" for k in pass_ks(num_samples)), f"maj@{num_samples}"]


class EvaluationConfig(Config, ABC):
    """When held-out data are looked at."""

    every: int = Field(default=10, ge=1)
    """Steps between validations; the last step is always validated."""
    at_start: bool = True
    """Also before the first step."""

    @property
    @abstractmethod
    def metrics(self) -> list[str]:
        """Names of everything that validation reports."""

    def due(self, step: int, *, last: int) -> bool:
        """Whether the model after `step` steps is validated."""
        if not self.metrics:
            return False
        if step == 0:
            return self.at_start
        return step == last or step % self.every == 0


class ValidationConfig(EvaluationConfig):
    """Held-out evaluation by the same rewards."""

    sets: dict[str, SourceConfig] = {}
    """Name -> source; no sets, no validation."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """n of mean@n, maj@n and pass@k for k = 1, 2, 4, ... and n."""
    sampling: SamplingConfig | None = None
    """Left out: the training `sampling`."""
    pass_score: float = 1.0
    """A sample passes when its reward is at least this."""

    @property
    def metrics(self) -> list[str]:
        """Names of everything that validation reports."""
        return [
            f"val/{name}/{score}"
            for name in self.sets
            for score in score_names(self.samples_per_prompt)
        ]


class TextValidation(EvaluationConfig):
    """The loss of held-out texts, every trained token counting the same."""

    sets: dict[str, TextSource] = {}
    """Name -> source; no sets, no validation."""

    @property
    def metrics(self) -> list[str]:
        return [f"val/{name}/loss" for name in self.sets]


class TaughtValidation(EvaluationConfig):
    """Held-out texts: the divergence from the teacher, and the loss of the texts themselves."""

    sets: dict[str, TaughtSource] = {}
    """Name -> source; no sets, no validation."""

    @property
    def metrics(self) -> list[str]:
        return [f"val/{name}/{score}" for name in self.sets for score in ("divergence", "loss")]


class PreferenceValidation(EvaluationConfig):
    """Held-out pairs."""

    sets: dict[str, PreferenceSource] = {}
    """Name -> source; no sets, no validation."""

    @property
    def metrics(self) -> list[str]:
        return [f"val/{name}/{score}" for name in self.sets for score in ("loss", "accuracy")]


BETTER_LOW = ("/loss", "/divergence", "/left_out", "/error_rate", "/timeout_rate")
"""Endings of metrics."""


def is_better_high(metric: str) -> bool:
    """Whether the largest value of a validation's metric is the best; of losses, and of shares of
    samples that have no score, the lowest is."""
    return not metric.endswith(BETTER_LOW)


class CheckpointConfig(Config):
    every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; left out: none but the last."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    keep_best: int = Field(default=0, ge=0)
    """Best checkpoints kept besides, by `best_metric`."""
    best_metric: str | None = None
    """For example `val/test/mean@1`."""
    higher_is_better: bool | None = None
    """Left out: yes, unless `best_metric` is a loss or a divergence."""
    export_hf: bool = True
    """Write the final weights as a Hugging Face folder `hf/`."""

    @property
    def prefers_high(self) -> bool:
        """Whether the largest value of `best_metric` is the best."""
        if self.higher_is_better is not None:
            return self.higher_is_better
        return is_better_high(self.best_metric or "")


class TrackConfig(Config):
    """Where metrics go, besides the terminal and metrics.jsonl."""

    tensorboard: bool = True
    wandb_project: str | None = None
    """W&B project; needs `pip install wandb`."""
    rollouts_every: int | None = Field(default=10, ge=1)
    """Steps between rollout dumps; null: never."""
    rollouts_samples: int = Field(default=64, ge=1)
    """Samples in one dump."""
    verify_weights: Literal["never", "first", "always"] = "first"
    """Compare checksums of trained and received weights: after the first sync, or after each."""
