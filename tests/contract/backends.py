"""The backends of the contract suites. A new backend joins by one line in a list here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from roll.algorithms.loss_interface import PolicyTerms
from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig, OptimizerConfig
from roll.config.sections.strategy import (
    DeepspeedConfig,
    Fsdp2Config,
    HfScoreConfig,
    MegatronConfig,
)
from roll.config.sections.training import ScoreRole, TrainRole
from roll.core.types import WorkerSpec
from roll.strategy.build import build_score, build_train
from roll.strategy.interfaces import ScoreStrategy, TrainStrategy
from roll.strategy.training.heads import PolicyHead

PLAIN_STEP = AdamWConfig(lr=1e6, eps=1e3, max_grad_norm=1e9)
"""An optimizer whose step shows the gradient; see `gradient_of_step`."""


def gradient_of_step(step: Tensor) -> Tensor:
    """Gradient g behind the first AdamW step, lr * g / (|g| + eps) from fresh moments."""
    return PLAIN_STEP.eps * step / (PLAIN_STEP.lr - step.abs())


PACKING = "packing"
OFFLOADED = "offload_activations"
TrainConfig = type[Fsdp2Config] | type[DeepspeedConfig] | type[MegatronConfig]


@dataclass(frozen=True)
class TrainBackend:
    """A backend under test: `strategy` is its config class, `options` its variants by name."""

    name: str
    strategy: TrainConfig
    options: tuple[str, ...]
    """Boolean options that change memory and speed, and no number; tested the other way round."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Options on more than one rank; one rank has none, and resumes what they wrote."""
    experts: bool = False
    """Tested on a mixture of experts."""
    adapters: bool = True
    """Whether it trains them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Options on any number of ranks."""

    @property
    def differs_alone(self) -> bool:
        """False if one rank, which has no layout, does what one rank of another backend does."""
        return self.experts or not self.layout

    def turned(self, option: str) -> dict[str, Any]:
        """Settings with this option as it is not by default."""
        if option == PACKING:  # of the role, not of the backend
            return {PACKING: True}
        if option == OFFLOADED:  # moves what another option saves
            return {OFFLOADED: True, "activation_checkpointing": True}
        return {option: not self.strategy.model_fields[option].default}

    def build(
        self,
        spec: WorkerSpec,
        model: ModelConfig,
        *,
        budget: int = 16384,
        chunk: int = 1024,
        temperature: float = 1.0,
        optimizer: OptimizerConfig = PLAIN_STEP,
        total_steps: int | None = None,
        packing: bool = False,
        **options: Any,
    ) -> TrainStrategy[PolicyTerms]:
        layout = self.layout if spec.world_size > 1 else {}
        role = TrainRole(
            pool="p",
            strategy=self.strategy(**layout, **self.settings, **options),
            optimizer=optimizer,
            max_tokens_per_microbatch=budget,
            packing=packing,
        )
        head = PolicyHead(temperature, chunk)
        return build_train(role, model, spec, head, total_steps=total_steps)


ZERO_3: dict[str, Any] = {"stage": 3, "whole_below_elements": 64}
"""The norms' weights of the tiny models stay whole, everything else is cut."""

TRAIN_BACKENDS = [
    TrainBackend(
        "fsdp2",
        Fsdp2Config,
        ("activation_checkpointing", OFFLOADED, "cpu_offload", "reshard_after_forward"),
    ),
    TrainBackend("fsdp2-ulysses2", Fsdp2Config, ("activation_checkpointing",), {"ulysses": 2}),
    TrainBackend(
        "fsdp2-tp2",
        Fsdp2Config,
        ("activation_checkpointing", "reshard_after_forward"),
        {"tp": 2},
        adapters=False,
    ),
    TrainBackend("fsdp2-hsdp", Fsdp2Config, ("reshard_after_forward",), {"replicas": 2}),
    TrainBackend(
        "fsdp2-ep2",
        Fsdp2Config,
        ("activation_checkpointing", "cpu_offload", "reshard_after_forward"),
        {"ep": 2},
        experts=True,
    ),
    *(
        TrainBackend(f"deepspeed-{name}", DeepspeedConfig, options, settings=settings)
        for name, options, settings in (
            ("zero0", ("activation_checkpointing",), {"stage": 0}),
            ("zero1", ("offload_optimizer",), {"stage": 1}),
            ("zero2", ("activation_checkpointing", "offload_optimizer"), {"stage": 2}),
            (
                "zero3",
                ("activation_checkpointing", OFFLOADED, "offload_optimizer", "offload_parameters"),
                ZERO_3,
            ),
        )
    ),
    TrainBackend(
        "megatron-dp2", MegatronConfig, ("distributed_optimizer", "overlap_grad_reduce", PACKING)
    ),
    TrainBackend(
        "megatron-zero",
        MegatronConfig,
        (),
        {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    TrainBackend("megatron-tp2", MegatronConfig, (PACKING,), {"tp": 2}),
    TrainBackend("megatron-pp2", MegatronConfig, (PACKING,), {"pp": 2}),
    TrainBackend("megatron-cp2", MegatronConfig, ("distributed_optimizer", PACKING), {"cp": 2}),
    TrainBackend(
        "megatron-ep2", MegatronConfig, ("distributed_optimizer", PACKING), {"ep": 2}, True
    ),
]


@dataclass(frozen=True)
class ScoreBackend:
    """As `TrainBackend`."""

    strategy: type[HfScoreConfig] | type[Fsdp2Config] | type[DeepspeedConfig] | type[MegatronConfig]
    layout: Mapping[str, Any] = field(default_factory=dict)
    experts: bool = False

    @property
    def model(self) -> str:
        """Its folder among those of the test."""
        return "experts" if self.experts else "dense"

    @property
    def reference(self) -> str:
        """The backend of plain Hugging Face passes on the same model."""
        return "hf-experts" if self.experts else "hf"

    def build(
        self,
        spec: WorkerSpec,
        model: ModelConfig,
        *,
        budget: int = 16384,
        chunk: int = 1024,
        temperature: float = 1.0,
    ) -> ScoreStrategy[PolicyTerms]:
        role = ScoreRole(
            pool="p",
            strategy=self.strategy(**(self.layout if spec.world_size > 1 else {})),
            max_tokens_per_microbatch=budget,
        )
        return build_score(role, model, spec, PolicyHead(temperature, chunk))


SCORE_BACKENDS = {
    "hf": ScoreBackend(HfScoreConfig),
    "fsdp2": ScoreBackend(Fsdp2Config),
    "fsdp2-ulysses2": ScoreBackend(Fsdp2Config, {"ulysses": 2}),
    "fsdp2-tp2": ScoreBackend(Fsdp2Config, {"tp": 2}),
    "deepspeed": ScoreBackend(DeepspeedConfig),
    "deepspeed-zero3": ScoreBackend(DeepspeedConfig, ZERO_3),
    "megatron": ScoreBackend(MegatronConfig),
    "megatron-cp2": ScoreBackend(MegatronConfig, {"cp": 2}),
    "hf-experts": ScoreBackend(HfScoreConfig, experts=True),
    "fsdp2-ep2": ScoreBackend(Fsdp2Config, {"ep": 2}, experts=True),
    "megatron-ep2": ScoreBackend(MegatronConfig, {"ep": 2}, experts=True),
}
