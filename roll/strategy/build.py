"""From a role's config to its backend. Each backend is imported only when a config names it."""

from __future__ import annotations

from typing import assert_never

from roll.config.model import ModelConfig
from roll.config.strategy import Fsdp2Config, HfEngineConfig
from roll.config.training import InferRole, ScoreRole, TrainRole
from roll.core.types import WorkerSpec
from roll.strategy.api import InferenceStrategy, ScoreStrategy, TrainStrategy


def build_train(
    role: TrainRole,
    model: ModelConfig,
    spec: WorkerSpec,
    *,
    temperature: float,
    total_steps: int | None,
) -> TrainStrategy:
    """The backend that trains; every rank of the cluster builds its own at the same time.

    Args:
        model: what the role trains; `RlvrConfig.train_model` says which.
        total_steps: optimizer steps of the whole run.
    """
    match role.strategy:
        case Fsdp2Config():
            from roll.strategy.fsdp2.train import Fsdp2Strategy

            return Fsdp2Strategy(
                role.strategy,
                spec=spec,
                model=model,
                temperature=temperature,
                max_tokens_per_microbatch=role.max_tokens_per_microbatch,
                logprob_chunk_tokens=role.logprob_chunk_tokens,
                optimizer=role.optimizer,
                total_steps=total_steps,
            )
    assert_never(role.strategy)


def build_score(
    role: ScoreRole, model: ModelConfig, spec: WorkerSpec, *, temperature: float
) -> ScoreStrategy:
    """The backend that scores with a frozen model."""
    if isinstance(role.strategy, Fsdp2Config):
        from roll.strategy.fsdp2.train import Fsdp2Strategy

        return Fsdp2Strategy(
            role.strategy,
            spec=spec,
            model=model,
            temperature=temperature,
            max_tokens_per_microbatch=role.max_tokens_per_microbatch,
            logprob_chunk_tokens=role.logprob_chunk_tokens,
            optimizer=None,
            total_steps=None,
        )
    from roll.strategy.hf.score import HfScore

    return HfScore(
        role.strategy,
        spec=spec,
        model=model,
        temperature=temperature,
        max_tokens_per_microbatch=role.max_tokens_per_microbatch,
        logprob_chunk_tokens=role.logprob_chunk_tokens,
    )


def build_engine(
    role: InferRole, model: ModelConfig, spec: WorkerSpec, *, max_model_len: int
) -> InferenceStrategy:
    """The engine of one replica; `start` loads the model."""
    dtype = role.dtype or model.dtype
    if isinstance(role.strategy, HfEngineConfig):
        from roll.strategy.hf.engine import HfEngine

        return HfEngine(
            role.strategy, spec=spec, model=model, dtype=dtype, max_model_len=max_model_len
        )
    from roll.strategy.vllm.engine import VllmEngine

    length = role.strategy.max_model_len or max_model_len
    return VllmEngine(role.strategy, spec=spec, model=model, dtype=dtype, max_model_len=length)
