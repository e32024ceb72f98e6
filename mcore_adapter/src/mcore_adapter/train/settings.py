"""What a run is told: every key, its type and its default. Importing it loads no torch."""

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
    """Strict and frozen: an unknown key is an error, and a value does not change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class Data(Section):
    train: Path
    """JSON lines: {"text"}; {"messages"} or {"prompt", "completion"}; {"chosen", "rejected"} and
    perhaps {"prompt"}, for pretrain, sft and dpo."""
    validation: Path | None = None
    max_length: PositiveInt = 2048
    """Tokens of the longest sequence."""
    too_long: Literal["error", "skip", "truncate", "split"] = "error"
    """What is done with longer ones. Truncation keeps the start; only pretrain can split."""
    shuffle: bool = True
    """Anew in every epoch."""


class Layout(Section):
    """How the model is cut; the ranks that remain are data parallel."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt | None = None
    layers: tuple[NonNegativeInt, ...] | None = None
    """Of each of the pp * vpp chunks; even if left."""
    sequence_parallel: bool | None = None
    """If left, where Megatron-Core wants it: with experts and tp > 1."""
    recompute: Literal["none", "attention", "full"] = "none"
    grouped_experts: bool = False
    """All experts of a rank in one product, instead of one after the other: faster on GPUs."""
    distributed_optimizer: bool = False
    """Cut Adam's states over data parallel ranks."""

    @property
    def sizes(self) -> ParallelSizes:
        return ParallelSizes(
            tp=self.tp, pp=self.pp, vpp=self.vpp, ep=self.ep, etp=self.etp, layers=self.layers
        )


class Batch(Section):
    examples: PositiveInt = 32
    """Of one optimizer step, over all ranks; of DPO, pairs."""
    tokens: PositiveInt = 8192
    """Of one micro-batch, padding included, at most."""
    packing: bool = True
    """Sequences of a micro-batch lie behind each other in one row, without padding between."""


class Optimizer(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    min_lr: NonNegativeFloat = 0.0
    """Where linear and cosine schedules end."""
    betas: tuple[NonNegativeFloat, NonNegativeFloat] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    """Not of biases and norms."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to it; 0: never."""


class Dpo(Section):
    beta: PositiveFloat = 0.1
    label_smoothing: NonNegativeFloat = 0.0
    """Probability that a pair is the wrong way round; less than 0.5."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.label_smoothing >= 0.5:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, expected less than 0.5")
        return self


class Lora(Section):
    """y = W x + alpha / rank * B A dropout(x); only A and B are trained, and exported for PEFT."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: NonNegativeFloat = 0.0
    """Less than 1."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Ends of the names of linear layers in Hugging Face, such as q_proj; or those of attention
    and, in models without experts, of MLPs. Not those of routed experts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dropout >= 1:
            raise ValueError(f"lora.dropout is {self.dropout}, expected less than 1")
        if not self.targets:
            raise ValueError("lora.targets is empty; name linear layers, or say all-linear")
        return self


class Settings(Section):
    method: Literal["pretrain", "sft", "dpo"]
    model: Path
    """A Hugging Face folder with tokenizer."""
    output: Path
    """Gets `checkpoints`, `data`, `metrics.jsonl` and, at the end, `model`, or `adapter`; seen by
    all ranks."""
    data: Data
    layout: Layout = Layout()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    dpo: Dpo = Dpo()
    lora: Lora | None = None
    """Instead of all weights, an adapter."""
    mtp_loss_weight: NonNegativeFloat = 0.0
    """Of the loss of layers that predict further tokens; 0: they are neither trained nor written.
    Not with dpo or lora."""
    epochs: PositiveInt | None = None
    """1 if neither epochs nor steps are given."""
    steps: PositiveInt | None = None
    """Instead of epochs."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of the weights that compute, and of those that are exported; Adam's are always fp32."""
    seed: NonNegativeInt = 0
    validate_every: PositiveInt | None = None
    """Steps between validations; they come at the start and the end anyway."""
    save_every: PositiveInt | None = None
    """Steps between checkpoints; one comes at the end anyway."""
    keep: PositiveInt = 2
    """Checkpoints; older ones are deleted."""
    log_every: PositiveInt = 10
    """Steps between lines, where there is no terminal for a progress bar."""
    resume: Literal["auto", "never"] = "never"
    """auto: go on from the last checkpoint in `output`, if there is one."""

    @property
    def sequences_each(self) -> int:
        """Sequences of an example: of DPO the chosen and the rejected one."""
        return 2 if self.method == "dpo" else 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both given; give one of them")
        if self.data.too_long == "split" and self.method != "pretrain":
            raise ValueError(f"data.too_long is split, which {self.method} cannot do; use another")
        if "dpo" in self.model_fields_set and self.method != "dpo":
            raise ValueError(f"dpo.* is given, but method is {self.method}; remove it")
        if self.mtp_loss_weight and (self.method == "dpo" or self.lora is not None):
            what = "method is dpo" if self.method == "dpo" else "lora is given"
            raise ValueError(f"mtp_loss_weight is {self.mtp_loss_weight}, but {what}; set it to 0")
        longest = self.data.max_length * self.sequences_each
        if self.batch.tokens < longest:
            raise ValueError(
                f"batch.tokens is {self.batch.tokens}, but one example can have {longest} tokens; "
                "raise it, or lower data.max_length"
            )
        return self


def read_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """A YAML file under `key.sub=value` overrides.

    Raises:
        ConfigError: everything that is wrong with it.
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
        # Through JSON, strict mode takes strings for paths and lists for tuples, and nothing else.
        return Settings.model_validate_json(json.dumps(found))
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from None


def describe(error: ValidationError) -> str:
    """Every fault with its key; for an unknown key, the one that was meant."""
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
