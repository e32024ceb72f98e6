"""Rules for what is trained of a model, an adapter (`model.lora`), some parts (`model.freeze`) or
layers that predict further tokens, and for the engines; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.engines import LoraRank, VllmConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.config.sections.strategy import Fsdp2Config, MegatronConfig

_OF_PATH = {"path", "made_by"}
"""Settings of a model that say where it lies."""


def sharded_adapter_problems(config: RunConfig) -> Iterator[str]:
    """Yield a problem for each trained adapter whose matrices would be cut by tensor
    parallelism."""
    for name, role in config.trained.items():
        lora = (role.model or config.train_model).lora
        if lora is not None and isinstance(role.strategy, Fsdp2Config) and role.strategy.tp > 1:
            yield (
                f"{name}.strategy.tp: adapters (model.lora) are not cut; leave out tp, or use "
                "kind: megatron, which does both"
            )


def part_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of parts that a role is told to train or to leave out."""
    for name, role in config.trained.items():
        model, key = role.model or config.train_model, config.model_key(name)
        if model.freeze and model.lora is not None:
            yield (
                f"{key}.freeze: an adapter ({key}.lora) leaves all weights as they are; drop one "
                f"of the two ({key}.lora.parts says which parts get an adapter)"
            )
        if not isinstance(role.strategy, MegatronConfig):
            continue
        if model.lora is not None and model.lora.parts != ("language",):
            yield f"{key}.lora.parts: megatron adapts the language model only; drop it"


def further_layer_problems(config: RunConfig) -> Iterator[str]:
    """Yield roles, adapters and pipelines with which no layers that predict further tokens are
    trained."""
    for name, role in config.trained.items():
        strategy, key = role.strategy, f"{name}.strategy.mtp_loss_weight"
        if not isinstance(strategy, MegatronConfig) or strategy.mtp_loss_weight is None:
            continue
        if name != Role.ACTOR_TRAIN:
            yield f"{key}: trains layers for engines, and none generates with this model; drop it"
        if (role.model or config.train_model).lora is not None:
            yield (
                f"{key}: an adapter ({config.model_key(name)}.lora) leaves all weights as they "
                "are; drop one of the two"
            )
        if config.pipeline == "reward_model":
            yield f"{key}: a reward model predicts no tokens; drop it"
        if config.pipeline == "dpo":
            yield (
                f"{key}: half of the texts of pipeline dpo are those that the policy learns not to "
                "write, and these layers would learn to predict them; drop it, and train them "
                "with pipeline: sft or in an RL run"
            )


def untrained_problems(config: RunConfig) -> Iterator[str]:
    """Yield settings of a top-level model that no role loads, and frozen parts of models that are
    not trained."""
    trained = {config.model_key(name) for name in config.trained}
    if "model" not in trained:
        for name in config.model.changed(*sorted(ModelConfig.model_fields.keys() - _OF_PATH)):
            yield (
                f"model.{name}: every role loads actor_train.model or a model of its own, so this "
                f"has no effect; set actor_train.model.{name}, or drop actor_train.model"
            )
    for key, model in config.models.items():
        if model.freeze and key not in trained | {"model"}:
            yield f"{key}.freeze: nothing of this model is trained; drop it"


def serving_without_engine_problems(config: RunConfig) -> Iterator[str]:
    """Yield a problem if a pipeline without engines is told how to serve an adapter."""
    if config.train_model.serves_adapter:
        yield f"model.lora.serve: pipeline {config.pipeline} has no engine to push to; drop it"


def serving_problems(config: RlvrBase) -> Iterator[str]:
    """Yield the problems of an adapter in a run whose engines sample from the policy."""
    lora, engine = config.train_model.lora, config.actor_infer.strategy
    if lora is not None and lora.dropout:
        yield (
            "model.lora.dropout: the ratio of two passes must not depend on chance; leave it out "
            "where the policy learns from samples"
        )
    keeps_some = lora is not None or bool(config.train_model.freeze)
    if keeps_some and isinstance(engine, VllmConfig) and engine.sleep_level == 2:
        yield (
            "actor_infer.strategy.sleep_level: 2 drops the weights, of which those that are not "
            "trained are not pushed again; use 1 with model.lora and model.freeze"
        )
    for name, served in config.roles.items():
        strategy = served.strategy
        drops = isinstance(strategy, VllmConfig) and strategy.sleep_level == 2
        if drops and name != Role.ACTOR_INFER:
            yield (
                f"{name}.strategy.sleep_level: 2 drops the weights in each step, and only "
                "actor_infer gets new ones in each; use 1"
            )
    for name, role in config.trained.items():
        if name != Role.ACTOR_TRAIN and role.model is not None and role.model.serves_adapter:
            yield f"{name}.model.lora.serve: no engine is pushed a {name}; drop it"
    if lora is not None and lora.serve == "adapter":
        yield from _adapter_engine_problems(lora.rank, engine)
    elif isinstance(engine, VllmConfig) and engine.max_lora_rank:
        yield (
            "actor_infer.strategy.max_lora_rank: no adapter is pushed, so it would take memory for "
            "nothing; drop it, or set model.lora.serve: adapter"
        )


def _adapter_engine_problems(rank: int, engine: object) -> Iterator[str]:
    """Yield why the engine cannot serve an adapter of `rank`: no vLLM, too high a rank, or pipeline
    stages.

    Args:
        engine: config of the engine's backend.
    """
    if not isinstance(engine, VllmConfig):
        yield (
            "model.lora.serve: only vllm takes an adapter as it is; set it to merged, or "
            "actor_infer.strategy.kind to vllm"
        )
        return
    ranks = get_args(LoraRank)
    if rank > max(ranks):
        yield (
            f"model.lora.rank: {rank} is more than the {max(ranks)} that vllm serves; lower it, or "
            "set model.lora.serve: merged"
        )
    elif engine.max_lora_rank < rank:
        yield (
            f"actor_infer.strategy.max_lora_rank: {engine.max_lora_rank} does not hold adapters of "
            f"model.lora.rank = {rank}; set it to {min(r for r in ranks if r >= rank)}, or "
            "model.lora.serve to merged"
        )
    if engine.pp > 1:
        yield (
            "actor_infer.strategy.pp: a stage refuses an adapter's tensors of other stages; set it "
            "to 1, or model.lora.serve to merged"
        )
