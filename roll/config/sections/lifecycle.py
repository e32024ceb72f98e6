"""Settings of validation, checkpoints and trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from roll.config.base import Config
from roll.config.errors import nearest
from roll.config.sections.data import PreferenceSource, SourceConfig, TaughtSource, TextSource
from roll.config.sections.sampling import SamplingConfig


def pass_ks(num_samples: int) -> list[int]:
    """Return the k of pass@k: 1, 2, 4, ... up to `num_samples`, and `num_samples` itself."""
    powers = {2**i for i in range(num_samples.bit_length())}
    return sorted(powers | {num_samples})


def score_names(num_samples: int) -> list[str]:
    """Return the names of the scores (mean@n, pass@k, maj@n) that a validation set with
    `num_samples` samples per prompt gets."""
    means = dict.fromkeys(["mean@1", f"mean@{num_samples}"])
    return [*means, *(f"pass@{k}" for k in pass_ks(num_samples)), f"maj@{num_samples}"]


BETTER_LOW = ("/loss", "/divergence", "/left_out", "/error_rate", "/timeout_rate")
"""Endings of the names of metrics of which the lowest value is the best."""


def is_better_high(metric: str) -> bool:
    """Return True if the largest value of a validation metric is the best. For losses, divergences,
    and shares of samples without a score, the lowest is."""
    return not metric.endswith(BETTER_LOW)


def prefers_high(metric: str, told: bool | None) -> bool:
    """Return True if the largest value of a validation metric is the best: as a config tells, or,
    if it tells None, `is_better_high`."""
    return is_better_high(metric) if told is None else told


class StopConfig(Config):
    """End of a run whose validation no longer improves."""

    metric: str
    """Name of the validation metric that must improve, for example `val/test/mean@1`."""
    patience: int = Field(ge=1)
    """Number of validations in a row without a better value after which the run ends. It saves a
    checkpoint and exports its weights, as after the last step."""
    min_change: float = Field(default=0.0, ge=0)
    """Number that the gain over the best value so far must exceed to count as better."""
    higher_is_better: bool | None = None
    """Treat larger values as better. If left out: true, unless `metric` is a loss, a divergence, or
    a share of samples without a score."""

    @property
    def prefers_high(self) -> bool:
        """True if the largest value of `metric` is the best."""
        return prefers_high(self.metric, self.higher_is_better)


class EvaluationConfig(Config, ABC):
    """Schedule of validation on held-out data."""

    every: int = Field(default=10, ge=1)
    """Number of steps between validations. The last step is always validated."""
    at_start: bool = True
    """Validate before the first step, too."""
    stop: StopConfig | None = None
    """Early end of the run by a validation metric. If left out: the run does all steps."""

    @property
    @abstractmethod
    def metrics(self) -> list[str]:
        """Names of all metrics that validation reports."""

    def due(self, step: int, *, last: int) -> bool:
        """Return True if the model after `step` steps is to be validated; always False without
        sets.

        Args:
            step: number of finished steps; 0 before the first.
            last: number of the run's last step.
        """
        if not self.metrics:
            return False
        if step == 0:
            return self.at_start
        return step == last or step % self.every == 0


class ValidationConfig(EvaluationConfig):
    """Validation on held-out prompts with the rewards of the run."""

    sets: Mapping[str, SourceConfig] = {}
    """Validation sets by name. Without sets there is no validation."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Number of samples per prompt: the n of mean@n, maj@n and pass@k for k = 1, 2, 4, ... and
    n."""
    sampling: SamplingConfig | None = None
    """Sampling settings for validation. If left out: the training `sampling`."""
    pass_score: float = 1.0
    """Reward from which on a sample passes."""

    @property
    def metrics(self) -> list[str]:
        return [
            f"val/{name}/{score}"
            for name in self.sets
            for score in score_names(self.samples_per_prompt)
        ]


class TextValidation(EvaluationConfig):
    """Validation by the loss of held-out texts, in which every trained token counts the same."""

    sets: dict[str, TextSource] = {}
    """Validation sets by name. Without sets there is no validation."""

    @property
    def metrics(self) -> list[str]:
        return [f"val/{name}/loss" for name in self.sets]


class TaughtValidation(EvaluationConfig):
    """Validation on held-out texts by the divergence from the teacher and the loss of the texts."""

    sets: dict[str, TaughtSource] = {}
    """Validation sets by name. Without sets there is no validation."""

    @property
    def metrics(self) -> list[str]:
        return [f"val/{name}/{score}" for name in self.sets for score in ("divergence", "loss")]


class PreferenceValidation(EvaluationConfig):
    """Validation on held-out preferences."""

    sets: dict[str, PreferenceSource] = {}
    """Validation sets by name. Without sets there is no validation."""

    @property
    def metrics(self) -> list[str]:
        return [f"val/{name}/{score}" for name in self.sets for score in ("loss", "accuracy")]


class CheckpointConfig(Config):
    """Checkpoints: when they are written, and which are kept."""

    every: int | None = Field(default=None, ge=1)
    """Number of steps between checkpoints. If left out: only the last step is saved."""
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: int = Field(default=0, ge=0)
    """Number of best checkpoints, by `best_metric`, to keep in addition."""
    best_metric: str | None = None
    """Name of the validation metric that ranks checkpoints, for example `val/test/mean@1`."""
    higher_is_better: bool | None = None
    """Treat larger values of `best_metric` as better. If left out: true, unless `best_metric` is a
    loss, a divergence, or a share of samples without a score."""
    asynchronous: bool = False
    """Write checkpoints beside the next steps, of a copy of the states in the memory of the
    machine, which must have room for it. At most one is written at a time; the last step's is
    waited for."""
    optimizer: bool = True
    """Save the state of the optimizers, too. Without it checkpoints are smaller, but a run goes on
    from one only with `restart_optimizer`."""
    restart_optimizer: bool = False
    """Go on from a checkpoint without the state of the optimizers, which then begin anew: the run
    is not the same as without the interruption."""
    upload: str | None = None
    """URL of a folder to which each complete checkpoint is copied beside the steps, such as
    `s3://bucket/run`; a scheme that fsspec knows. Copies are never deleted, so each run needs a URL
    of its own. null: no copies."""
    export_hf: bool = True
    """Write the final weights as a Hugging Face folder `hf/`."""

    @field_validator("upload")
    @classmethod
    def _is_url(cls, upload: str | None) -> str | None:
        if upload is not None and "://" not in upload:
            raise ValueError(
                f"{upload!r} is no URL; write `s3://bucket/folder`, or `file:///folder` for a path"
            )
        return upload

    @property
    def prefers_high(self) -> bool:
        """True if the largest value of `best_metric` is the best."""
        return prefers_high(self.best_metric or "", self.higher_is_better)


ProfileKind = Literal["torch", "memory", "nsys"]


class ProfileConfig(Config):
    """Recording of single steps: which worker does what when, and what happens inside some."""

    steps: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Steps to record. Each costs time and gets a folder `profile/step_<step>` in output_dir."""
    roles: tuple[str, ...] = ("actor_train",)
    """Roles whose calls are recorded from inside; roles that train or score, by their keys."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Ranks of these roles that are recorded."""
    kind: ProfileKind = "torch"
    """What is recorded. `torch`: operators and kernels, by PyTorch, as a Chrome trace. `memory`:
    every allocation of GPU memory, by PyTorch, as a snapshot for https://pytorch.org/memory_viz.
    `nsys`: CUDA calls, kernels, copies and communication, by NVIDIA Nsight Systems, which starts
    these workers and must be installed on every node, at one path."""


SERVICES = ("wandb", "mlflow", "swanlab", "trackio", "clearml")
"""Services that trackers send to, by the name of their package."""


class TrackerConfig(Config):
    """A service, or a class of yours, that gets the metrics of every step."""

    kind: str
    """`wandb`, `mlflow`, `swanlab`, `trackio` or `clearml`, whose package must be installed; or the
    import path of a class, `my_module:MyTracker`."""
    project: str = "roll"
    """Name of the project there; of MLflow: of the experiment."""
    name: str | None = None
    """Name of the run there. null: the last two parts of output_dir, such as `quickstart-run`."""
    kwargs: dict[str, Any] = {}
    """Further arguments for `wandb.init`, `MlflowClient`, `swanlab.init`, `trackio.init`, clearml's
    `Task.init`, or the class."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        if kind not in SERVICES and ":" not in kind:
            raise ValueError(
                f"unknown service {kind!r}{nearest(kind, SERVICES)} (known: "
                f"{', '.join(SERVICES)}; or the import path of a class, 'my_module:MyTracker')"
            )
        return kind


class TrackConfig(Config):
    """Trackers that metrics are sent to, besides the terminal and metrics.jsonl."""

    tensorboard: bool = True
    """Write the metrics to `tensorboard/` in output_dir."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Services and classes that also get the metrics. One that fails is switched off, and the run
    goes on."""
    rollouts_every: int | None = Field(default=10, ge=1)
    """Number of steps between dumps of rollouts. null: no dumps."""
    rollouts_samples: int = Field(default=64, ge=1)
    """Number of samples in one dump."""
    samples: Literal["all", "validation", "none"] = "validation"
    """Samples that are kept whole, with tokens and log-probs, as Parquet in `samples/`: those of
    every step and every validation, those of validations, or none. `roll samples` reads them."""
    verify_weights: Literal["never", "first", "always"] = "first"
    """Comparison of checksums of the trained weights and the weights that engines received: after
    the first weight push, after every push, or never."""

    @model_validator(mode="after")
    def _dumps_something(self) -> Self:
        """Refuse a size of dumps without dumps."""
        if self.rollouts_every is None and self.changed("rollouts_samples"):
            raise ValueError(
                "rollouts_samples: with rollouts_every: null nothing is dumped; drop one of the two"
            )
        return self
