"""Functions that build the backend of a role from the role's config.

A backend is imported only when a config names it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar, assert_never, cast

from roll.config.sections.engines import HfEngineConfig, SglangConfig, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.strategy import (
    DeepspeedConfig,
    Fsdp2Config,
    HfScoreConfig,
    MegatronConfig,
    TrainStrategyConfig,
)
from roll.config.sections.training import InferRole, LearnerRole, ScoreRole
from roll.core.errors import ConfigError
from roll.core.types import WorkerSpec
from roll.strategy.backend_setup import EngineSetup, ModelSetup
from roll.strategy.interfaces import EnginePart, InferenceStrategy, ScoreStrategy, TrainStrategy
from roll.strategy.training.heads import Head
from roll.strategy.training.teacher_forward import TeacherHead, TeacherTerms

T = TypeVar("T")


def build_train(
    role: LearnerRole,
    model: ModelConfig,
    spec: WorkerSpec,
    head: Head[T],
    *,
    total_steps: int | None,
    keeps_reference: bool = False,
) -> TrainStrategy[T]:
    """Build the training backend of this rank; every rank of the cluster calls this together.

    Args:
        model: the model that the role trains, from `RunConfig.train_model`.
        head: `PolicyHead` for a policy, `ValueHead` for a critic, `ScoreHead` for a reward model.
        total_steps: number of optimizer steps of the whole run.
        keeps_reference: True to keep a copy of the weights (`KeepsReference`); for fsdp2 only.
    """
    setup = replace(
        _frozen(role, model, spec, head),
        optimizer=role.optimizer,
        total_steps=total_steps,
        keeps_reference=keeps_reference,
    )
    return _learner(role.strategy, setup)


def build_score(
    role: ScoreRole, model: ModelConfig, spec: WorkerSpec, head: Head[T]
) -> ScoreStrategy[T]:
    """Build the backend that scores with a frozen model; every rank of the cluster calls this.

    Args:
        model: the model that the role scores with.
        head: as for `build_train`, or `TeacherHead` for a teacher.
    """
    setup = _frozen(role, model, spec, head)
    if isinstance(role.strategy, HfScoreConfig):
        from roll.strategy.hf.score import HfScore

        return HfScore(role.strategy, setup)
    if isinstance(role.strategy, MegatronConfig) and isinstance(head, TeacherHead):
        from roll.strategy.megatron.teacher import MegatronTeacher

        teacher = MegatronTeacher(role.strategy, cast(ModelSetup[TeacherTerms], setup), head)
        return cast(ScoreStrategy[T], teacher)  # T is TeacherTerms
    return _learner(role.strategy, setup)


def _frozen(
    role: LearnerRole | ScoreRole, model: ModelConfig, spec: WorkerSpec, head: Head[T]
) -> ModelSetup[T]:
    """Return a setup without an optimizer, which the caller may add; alone, it only scores."""
    return ModelSetup(
        spec=spec,
        model=model,
        head=head,
        max_tokens_per_microbatch=role.max_tokens_per_microbatch,
        packing=role.packing,
    )


def _learner(strategy: TrainStrategyConfig, setup: ModelSetup[T]) -> TrainStrategy[T]:
    """Build a backend that can train; without an optimizer in `setup` the backend only scores."""
    match strategy:
        case MegatronConfig():
            from roll.strategy.megatron.train import MegatronStrategy

            return MegatronStrategy(strategy, setup)
        case Fsdp2Config():
            from roll.strategy.fsdp2.train import Fsdp2Strategy

            return Fsdp2Strategy(strategy, setup)
        case DeepspeedConfig():
            from roll.strategy.deepspeed.train import DeepspeedStrategy

            return DeepspeedStrategy(strategy, setup)
    assert_never(strategy)


def build_engine(
    role: InferRole, model: ModelConfig, spec: WorkerSpec, *, max_model_len: int
) -> InferenceStrategy:
    """Build the engine of one replica. The model is loaded later, by the engine's `start`.

    Args:
        max_model_len: maximum length of prompt plus response, in tokens, unless the config of the
            engine sets its own.
    """
    setup = _engine_setup(role, model, spec, max_model_len)
    match role.strategy:
        case HfEngineConfig():
            from roll.strategy.hf.engine import HfEngine

            return HfEngine(role.strategy, setup)
        case SglangConfig():
            from roll.strategy.sglang.engine import SglangEngine

            return SglangEngine(role.strategy, setup)
        case VllmConfig():
            from roll.strategy.vllm.engine import VllmEngine

            return VllmEngine(role.strategy, setup)
    assert_never(role.strategy)


def build_engine_part(
    role: InferRole, model: ModelConfig, spec: WorkerSpec, *, max_model_len: int
) -> EnginePart:
    """Build the part of an engine on one of its further nodes; the arguments are those of
    `build_engine`.

    Raises:
        ConfigError: engines of this kind lie on one node.
    """
    if not isinstance(role.strategy, VllmConfig):
        raise ConfigError(
            f"{spec.name}: an engine of kind {role.strategy.kind} cannot lie on several nodes; use "
            "a smaller tp, or kind: vllm"
        )
    from roll.strategy.vllm.follower import VllmFollower

    return VllmFollower(role.strategy, _engine_setup(role, model, spec, max_model_len))


def _engine_setup(
    role: InferRole, model: ModelConfig, spec: WorkerSpec, max_model_len: int
) -> EngineSetup:
    """Return the settings of an engine that are not of its kind alone."""
    return EngineSetup(
        spec=spec, model=model, dtype=role.dtype or model.dtype, max_model_len=max_model_len
    )
