"""Settings of a training run: every key, its type and its default.

Importing this module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from mcore_adapter.errors import ConfigError
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.train.spelling import nearest_key


class Section(BaseModel):
    """Base of a section of the settings. Unknown keys are errors, and values cannot change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class Data(Section):
    """Training and validation data."""

    train: Path
    """Training data, a file of JSON lines. Keys of a row for pretrain: text. For sft: messages, or
    prompt and completion. For dpo: chosen, rejected and optionally prompt."""
    validation: Path | None = None
    """Validation data, in the same format; None: no validation."""
    max_length: int = Field(default=2048, ge=2)
    """Largest number of tokens of a sequence; at least 2, for the first token of a sequence is not
    trained."""
    too_long: Literal["error", "skip", "truncate", "split"] = "error"
    """Treatment of longer sequences. error: stop with an error. skip: leave out the row. truncate:
    keep the start of the sequence. split: cut the sequence into several (only for pretrain)."""
    shuffle: bool = True
    """Shuffle the examples, in a new order in every epoch."""


class Layout(Section):
    """Distribution of the model over ranks. The remaining factor of the ranks is data parallel."""

    tp: PositiveInt = 1
    """Number of tensor parallel ranks."""
    pp: PositiveInt = 1
    """Number of pipeline stages."""
    vpp: PositiveInt = 1
    """Number of chunks of layers on each stage (virtual pipeline)."""
    ep: PositiveInt = 1
    """Number of expert parallel ranks."""
    etp: PositiveInt | None = None
    """Number of tensor parallel ranks of experts; None: the same as tp."""
    layers: tuple[NonNegativeInt, ...] | None = None
    """Number of layers of each of the pp * vpp chunks, in the order of the model; None: the same
    number for all chunks."""
    sequence_parallel: bool | None = None
    """Sequence parallelism; None: only where Megatron-Core requires it, for models with experts or
    latent attention and tp > 1."""
    recompute: Literal["none", "attention", "full"] = "none"
    """Activations that are computed again instead of kept in memory: none, those of core attention,
    or all but the input of each layer."""
    grouped_experts: bool = False
    """Compute all experts of a rank in one product instead of one after the other. This is faster
    on GPUs."""
    distributed_optimizer: bool = False
    """Distribute the states of Adam over the data parallel ranks."""

    @property
    def sizes(self) -> ParallelSizes:
        """The parallel sizes alone."""
        return ParallelSizes(
            tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=self.etp, layers=self.layers
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "layout.sequence_parallel is true, but layout.tp is 1, so there are no tensor "
                "parallel ranks to divide sequences over; remove it, or raise layout.tp"
            )
        return self


class Batch(Section):
    """Sizes of batches."""

    examples: PositiveInt = 32
    """Number of examples of one optimizer step, over all ranks. For DPO an example is a pair."""
    tokens: PositiveInt = 8192
    """Largest number of tokens of one micro-batch, padding included."""
    packing: bool = True
    """Put all sequences of a micro-batch one after the other into one row, without padding between
    them. Otherwise each sequence has a row of its own."""


class Optimizer(Section):
    """Options of AdamW and of the schedule of its learning rate."""

    lr: PositiveFloat = 1e-5
    """Peak of the learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of the learning rate after warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps in which the learning rate grows linearly to its peak; with a linear or
    cosine schedule less than the number of steps of the run."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate of the last step with a linear or cosine schedule; at most `lr`."""
    betas: tuple[NonNegativeFloat, NonNegativeFloat] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square; less than 1."""
    eps: PositiveFloat = 1e-8
    """Number added to the denominator of Adam."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay, which is not applied to biases and norms."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Limit of the gradient norm; larger gradients are scaled down to it. 0: no limit."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr and self.schedule == "constant":
            raise ValueError(
                f"optimizer.min_lr is {self.min_lr}, but optimizer.schedule is constant, which "
                "does not decay; remove it, or set the schedule to linear or cosine"
            )
        if self.min_lr > self.lr:
            raise ValueError(
                f"optimizer.min_lr is {self.min_lr}, above optimizer.lr, {self.lr}, so that the "
                "learning rate would rise; lower it"
            )
        if max(self.betas) >= 1:
            raise ValueError(f"optimizer.betas is {self.betas}, expected two numbers less than 1")
        return self

    def warmup_problem(self, num_steps: int) -> str | None:
        """Return why a run of so many steps is too short for the warm-up; None if it is not.

        A constant schedule does not depend on the number of steps: such a run can go on later, with
        more steps, as if it had not ended within its warm-up.
        """
        if self.schedule == "constant" or self.warmup_steps < num_steps:
            return None
        most = "set it to 0" if num_steps == 1 else f"set it to at most {num_steps - 1}"
        return (
            f"optimizer.warmup_steps is {self.warmup_steps}, and the run has {num_steps} steps, "
            f"which leaves none for the {self.schedule} decay; {most}, raise the number of steps, "
            "or set optimizer.schedule to constant"
        )


class Dpo(Section):
    """Options of DPO."""

    beta: PositiveFloat = 0.1
    """Weight of the log-probability ratios to the reference model (beta in arXiv 2305.18290)."""
    label_smoothing: NonNegativeFloat = 0.0
    """Assumed probability that the chosen and the rejected answer of a pair are swapped; less than
    0.5."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.label_smoothing >= 0.5:
            raise ValueError(
                f"dpo.label_smoothing is {self.label_smoothing}, expected less than 0.5"
            )
        return self


class Lora(Section):
    """Options of LoRA: y = W x + alpha / rank * B A dropout(x).

    Only A and B are trained. They are exported for PEFT.
    """

    rank: PositiveInt = 16
    """Number of rows of A, which is the number of columns of B."""
    alpha: PositiveFloat = 32.0
    """Numerator of the factor of B A."""
    dropout: NonNegativeFloat = 0.0
    """Probability that an input is dropped; less than 1."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Ends of Hugging Face names of linear layers, such as q_proj. all-linear: the linear layers of
    attention, and of MLPs if the model has no experts. Routed experts cannot be targets."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dropout >= 1:
            raise ValueError(f"lora.dropout is {self.dropout}, expected less than 1")
        if not self.targets:
            raise ValueError("lora.targets is empty; name linear layers, or say all-linear")
        return self


class Settings(Section):
    """All settings of a training run."""

    method: Literal["pretrain", "sft", "dpo"]
    """Training method: pretraining, supervised fine-tuning or DPO."""
    model: Path
    """Hugging Face folder of the model that training starts from, with its tokenizer."""
    output: Path
    """Output folder, which must be visible to all ranks. The run writes `checkpoints`, `data` and
    `metrics.jsonl` there, and at the end `model` or, with lora, `adapter`."""
    data: Data
    layout: Layout = Layout()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    dpo: Dpo = Dpo()
    """Options of DPO; only allowed if method is dpo."""
    lora: Lora | None = None
    """Options of LoRA: train an adapter instead of all weights; None: train all weights."""
    mtp_loss_weight: NonNegativeFloat = 0.0
    """Weight of the loss of the layers that predict further tokens (MTP). 0: these layers are
    neither trained nor written. Must be 0 with dpo or lora."""
    epochs: PositiveInt | None = None
    """Number of passes over the training data; 1 if neither epochs nor steps are given."""
    steps: PositiveInt | None = None
    """Number of optimizer steps; may be given instead of epochs."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Data type of the weights in computation and in the exported model. The states of Adam and its
    copy of the weights are always fp32."""
    seed: NonNegativeInt = 0
    """Seed of shuffling, dropout and new weights."""
    validate_every: PositiveInt | None = None
    """Number of steps between validations; None: validate only at the start and at the end. The
    model is validated at the start and at the end in any case. Needs `data.validation`."""
    save_every: PositiveInt | None = None
    """Number of steps between checkpoints; None: only at the end. A checkpoint is written at the
    end in any case."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep. Older ones are deleted."""
    log_every: PositiveInt = 10
    """Number of steps between log lines, if there is no terminal for a progress bar."""
    resume: Literal["auto", "never"] = "never"
    """auto: continue from the last checkpoint in `output`, if there is one. never: start anew;
    `output` must not have results of another run."""

    @property
    def sequences_per_example(self) -> int:
        """Number of sequences of an example: 2 for DPO (chosen and rejected), otherwise 1."""
        return 2 if self.method == "dpo" else 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise ValueError if two settings conflict or an example can exceed `batch.tokens`."""
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both given; give one of them")
        if self.data.too_long == "split" and self.method != "pretrain":
            raise ValueError(f"data.too_long is split, which {self.method} cannot do; use another")
        if "dpo" in self.model_fields_set and self.method != "dpo":
            raise ValueError(f"dpo.* is given, but method is {self.method}; remove it")
        if self.mtp_loss_weight and (self.method == "dpo" or self.lora is not None):
            what = "method is dpo" if self.method == "dpo" else "lora is given"
            raise ValueError(f"mtp_loss_weight is {self.mtp_loss_weight}, but {what}; set it to 0")
        if self.validate_every is not None and self.data.validation is None:
            raise ValueError(
                f"validate_every is {self.validate_every}, but there is no data.validation; name a "
                "file there, or remove validate_every"
            )
        if self.steps is not None and (problem := self.optimizer.warmup_problem(self.steps)):
            raise ValueError(problem)
        sequences, rows = self.sequences_per_example, 1
        if not self.batch.packing:
            sequences, rows = 1, sequences
        row = self.data.max_length * sequences
        longest = (row + -row % self.layout.tp) * rows  # rows are padded to a multiple of tp
        if self.batch.tokens < longest:
            raise ValueError(
                f"batch.tokens is {self.batch.tokens}, but one example can have {longest} tokens; "
                "raise it, or lower data.max_length"
            )
        return self


def read_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Read the settings from a YAML file and apply overrides of the command line.

    Args:
        path: path of the YAML file.
        overrides: texts of the form `key.sub=value`, which replace values of the file.

    Raises:
        ConfigError: the file or an override is invalid; of invalid keys the message lists all.
        OSError: the file cannot be read.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"{override!r} on the command line, expected key.sub=value")
    try:
        merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
        found: Any = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is no mapping in YAML: {error}") from None
    try:
        # From JSON, strict mode accepts strings as paths and lists as tuples, but converts no other
        # types.
        return Settings.model_validate_json(json.dumps(found))
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from None


def describe(error: ValidationError) -> str:
    """Return a text with every fault and its key, and a suggestion for each unknown key."""
    faults = []
    for fault in error.errors():
        key = ".".join(map(str, fault["loc"]))
        if fault["type"] == "extra_forbidden":
            faults.append(f"unknown key {key}{nearest_key(key, Settings)}")
        elif fault["type"] == "missing":
            faults.append(f"{key} is missing")
        elif fault["type"] == "value_error":
            faults.append(str(fault["ctx"]["error"]))
        else:
            faults.append(f"{key} is {fault['input']!r}: {fault['msg']}")
    return "; ".join(faults)
