"""Rules for the run files of pipelines that train on existing rows; see
`roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from roll.config.algorithm.preferences import PreferenceLossConfig
from roll.config.checks.adapter import serving_without_engine_problems
from roll.config.checks.common import (
    nearest_numbers,
    run_problems,
    usual_pool,
    weighted_set_problems,
)
from roll.config.checks.teacher import teacher_problems
from roll.config.offline_base import OfflineConfig, PreferenceConfig
from roll.config.sections.data import TaughtDataConfig
from roll.config.sections.lifecycle import TaughtValidation
from roll.config.sections.training import ScoreRole, TeacherRole


def offline_problems(config: OfflineConfig) -> Iterator[str]:
    """Yield the problems that a config of any pipeline on existing rows can have."""
    yield from run_problems(config)
    yield from serving_without_engine_problems(config)
    yield from weighted_set_problems(config.validation.sets)
    for key in config.track.changed("rollouts_every", "rollouts_samples", "samples"):
        yield f"track.{key}: pipeline {config.pipeline} generates no samples to keep; drop it"
    for key in config.track.changed("verify_weights"):
        yield f"track.{key}: pipeline {config.pipeline} has no engine to push to; drop it"
    if config.epochs is None and "max_steps" not in config.model_fields_set:
        yield "epochs: set epochs or max_steps; nothing else ends the run"
    if any(pool not in config.pools for pool in config.role_pools.values()):
        return
    rows = config.data.rows_per_step
    for name, role in config.computing.items():
        parts = config.num_parts(name)
        if rows % parts and not isinstance(role, TeacherRole):  # padded with copies
            near = nearest_numbers(rows, range(parts, rows + 2 * parts, parts))
            yield (
                f"data.rows_per_step: {rows} rows do not divide over the {parts} data-parallel "
                f"ranks of pool {role.pool!r}; nearest that do: {near}"
            )


def labelled_source_problems(config: PreferenceConfig) -> Iterator[str]:
    """Yield sources of labelled responses, for a loss that compares two responses."""
    sources = {f"data.sources.{i}": source for i, source in enumerate(config.data.sources)}
    sources |= {f"validation.sets.{name}": s for name, s in config.validation.sets.items()}
    for key, source in sources.items():
        if source.columns.label is not None:
            yield (
                f"{key}.columns.label: this loss compares pairs; name `chosen` and `rejected`, or "
                "use pipeline: dpo with loss.kind: kto"
            )


def reward_model_problems(config: PreferenceConfig) -> Iterator[str]:
    """Yield sources of labelled responses, and settings of logits, which a reward model has not."""
    yield from labelled_source_problems(config)
    if config.actor_train.changed("logprob_chunk_tokens"):
        yield (
            "actor_train.logprob_chunk_tokens: a reward model has a score and no logits; drop it"
        )


def distill_problems(
    teachers: Mapping[str, TeacherRole], data: TaughtDataConfig, validation: TaughtValidation
) -> Iterator[str]:
    """Yield the problems of teachers: tags without a source or of several teachers, and sources
    without a teacher."""
    sources = {f"data.sources.{i}": source for i, source in enumerate(data.sources)}
    sources |= {f"validation.sets.{name}": s for name, s in validation.sets.items()}
    yield from teacher_problems(teachers, sources)


def dpo_problems(
    config: PreferenceConfig,
    loss: PreferenceLossConfig,
    reference: ScoreRole | None,
    reference_logprobs: Literal["per_step", "once"],
) -> Iterator[str]:
    """Yield a reference that the loss lacks or does not use (an adapter's base is one), margins,
    pairs mixed with labelled responses, and too few rows per step."""
    if loss.needs_reference and reference is None and not config.base_is_reference:
        yield (
            f"reference: loss.kind {loss.kind} needs a `reference` role; add "
            f"`reference: {{pool: {usual_pool(config)}}}`, or train an "
            "adapter (model.lora), whose base is the reference"
        )
    if not loss.needs_reference and reference is not None:
        yield f"reference: loss.kind {loss.kind} compares with no reference; drop the role"
    without = reference is None and not config.base_is_reference
    if (without or not loss.needs_reference) and reference_logprobs == "once":
        yield "reference_logprobs: there is no reference to score with; drop it"
    kinds = {source.columns.label is None for source in config.data.sources}
    if len(kinds) > 1:
        yield (
            "data.sources: some hold pairs, others responses with a label; a step needs as many "
            "rows each time, so use one kind"
        )
    sources = {f"data.sources.{i}": source for i, source in enumerate(config.data.sources)}
    sources |= {f"validation.sets.{name}": s for name, s in config.validation.sets.items()}
    for key, source in sources.items():
        if source.columns.margin is not None:
            yield f"{key}.columns.margin: no loss of `dpo` has margins; drop it"
    if loss.paired:
        yield from labelled_source_problems(config)
    elif config.data.rows_per_step < 2:
        yield (
            f"data.rows_per_step: loss.kind {loss.kind} compares responses with other prompts of "
            "the step and needs at least 2 rows"
        )
