"""Teachers of a run: each answers for the rows with its tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from roll.config.algorithm.divergences import DistillTargetConfig
from roll.config.run import RunConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.config.sections.training import TeacherRole
from roll.core.batches import RolloutBatch, TeacherColumn, TokenColumn, TrainBatch
from roll.core.errors import ConfigError
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.distributed.colocation import Colocation
from roll.models.load import load_config, load_tokenizer
from roll.models.vocabulary import num_tokens
from roll.workers.model import TrainWorker
from roll.workers.reference import ReferenceWorker
from roll.workers.teacher import TeacherWorker

B = TypeVar("B", bound=TrainBatch)
A = TypeVar("A")


def by_teacher(tags: Sequence[str], teachers: Mapping[str, TeacherRole]) -> dict[str, list[int]]:
    """Return name of the teacher -> indices of its rows, from the tag of each row. Every tag must
    have a teacher; `check_tags` has checked this before."""
    teacher_of = {tag: name for name, role in teachers.items() for tag in role.tags}
    rows: dict[str, list[int]] = {}
    for row, tag in enumerate(tags):
        rows.setdefault(teacher_of[tag], []).append(row)
    return rows


def ask_teachers(
    batch: B,
    rows_of: Mapping[str, Sequence[int]],
    ranks: Mapping[str, int],
    ask: Callable[[str, B], Sequence[A]],
) -> list[A]:
    """Return one answer per row, in the order of the rows; each comes from the row's teacher.

    Args:
        batch: all rows.
        rows_of: name of the teacher -> indices of its rows; every row has one teacher.
        ranks: name of the teacher -> number of its data-parallel ranks. The rows of a teacher are
            filled up with copies of its last row until they divide evenly over the ranks.
        ask: function that takes the name of a teacher and rows, and returns one answer per row.
    """
    answers: dict[int, A] = {}
    for name, rows in rows_of.items():
        filled = [*rows, *[rows[-1]] * (-len(rows) % ranks[name])]
        answers.update(zip(rows, ask(name, batch.select(filled)), strict=False))
    return [answers[row] for row in range(len(batch))]


def start_teacher(
    name: str,
    role: TeacherRole,
    launcher: Launcher,
    *,
    target: DistillTargetConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> Cluster[TeacherWorker]:
    """Start the cluster of a teacher from whose whole distributions students learn."""
    place = Placement(Role.TEACHER, pool=role.pool, seed=seed, label=name, env=role.env)
    return launcher.start(TeacherWorker, place, role, target, num_tokens(tokenizer))


@dataclass(frozen=True, slots=True)
class Teachers:
    """All teachers of a run, with their clusters."""

    roles: Mapping[str, TeacherRole]
    clusters: Mapping[str, Cluster[Any]]
    """Name of the teacher -> its cluster: of `TeacherWorker`s for `outputs` and `introduce`, of
    `ReferenceWorker`s for `logprobs`."""
    colocation: Colocation

    def logprobs(self, batch: RolloutBatch, tags: Sequence[str]) -> Tensor:
        """Return the log-probs of the response tokens under the teacher of each row's tag, float32
        `[B, T]`."""

        def ask(cluster: Cluster[Any], rows: RolloutBatch) -> list[Tensor]:
            scored: TokenColumn = cluster.call(ReferenceWorker.logprobs, rows.inputs())
            return list(scored.aligned(rows))

        return torch.stack(self._ask(batch, tags, ask))

    def outputs(self, batch: TrainBatch, tags: Sequence[str]) -> list[Any]:
        """Return a `RemoteValue` of a `TeacherRow` for each row: the output of the teacher of the
        row's tag, for the trained tokens."""

        def ask(cluster: Cluster[Any], rows: TrainBatch) -> list[Any]:
            found: TeacherColumn = cluster.call(TeacherWorker.outputs, rows.trained_inputs())
            return found.outputs

        return self._ask(batch, tags, ask)

    def introduce(self, students: Cluster[Any]) -> None:
        """Send the output head of every teacher to all workers of the students. The head turns
        the hidden states in the teacher's outputs into logits."""
        heads = {}
        for name, cluster in self.clusters.items():
            with self.colocation.use(f"teachers.{name}"):
                (heads[name],) = cluster.call(TeacherWorker.output_head)
        students.call(TrainWorker.receive_teacher_heads, heads)

    def _ask(
        self, batch: B, tags: Sequence[str], ask: Callable[[Cluster[Any], B], Sequence[A]]
    ) -> list[A]:
        """Ask each teacher about its rows, with the teacher on its devices; see `ask_teachers`."""

        def ask_one(name: str, rows: B) -> Sequence[A]:
            with self.colocation.use(f"teachers.{name}"):
                return ask(self.clusters[name], rows)

        ranks = {name: cluster.dp_size for name, cluster in self.clusters.items()}
        return ask_teachers(batch, by_teacher(tags, self.roles), ranks, ask_one)


def check_others(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    target: DistillTargetConfig | None,
    key: str,
) -> None:
    """Raise ConfigError unless teachers, reward models and opponents know the tokens of the trained
    model.

    Args:
        tokenizer: tokenizer of the trained model.
        target: settings of what the teachers send; None if they send only log-probs.
        key: key of `target` in the config, for error messages.

    Raises:
        ConfigError: one of these has other tokens, or a teacher fails `check_distill_target`.
    """
    teachers, rewards, opponents = (
        {key: model for key, model in config.models.items() if key.startswith(kind)}
        for kind in ("teachers.", "rewards.", "opponents.")
    )
    require_same_tokens(config.train_model, teachers | rewards | opponents)
    if target is not None:
        check_distill_target(target, key, tokenizer, {"model": config.train_model} | teachers)


def check_distill_target(
    target: DistillTargetConfig,
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    models: Mapping[str, ModelConfig],
) -> None:
    """Raise ConfigError unless `top_k` and the models' vocabularies fit the tokenizer.

    Args:
        target: settings of what the teachers send.
        key: key of `target` in the config, for error messages.
        tokenizer: tokenizer that student and teachers share.
        models: key in the config -> student or teacher.

    Raises:
        ConfigError: `top_k` is not smaller than the number of tokens, or a model has fewer logits
            than the tokenizer has tokens.
    """
    count = num_tokens(tokenizer)
    if target.top_k is not None and target.top_k >= count:
        raise ConfigError(
            f"{key}.top_k: {target.top_k} of {count} tokens are all of them; leave top_k out"
        )
    for name, model in models.items():
        size = load_config(model).get_text_config().vocab_size
        if size < count:
            raise ConfigError(
                f"{name}: gives {size} logits, and the tokenizer has {count} tokens; use a model "
                "that knows all of them, or a tokenizer without the others"
            )


def require_same_tokens(policy: ModelConfig, others: Mapping[str, ModelConfig]) -> None:
    """Raise ConfigError unless every other model has the same tokens under the same ids.

    Other models (teachers, reward models, opponents) read the token ids of the trained model. All
    tokenizers are loaded.

    Args:
        policy: the trained model.
        others: key in the config -> model.

    Raises:
        ConfigError: an id stands for another token, or only one of the two vocabularies has it; the
            message names the smallest such id.
    """
    if not others:
        return
    own = load_tokenizer(policy).get_vocab()
    for key, model in others.items():
        difference = _first_difference(own, load_tokenizer(model).get_vocab())
        if difference:
            raise ConfigError(f"{key}: {difference}; use a model of the same family")


def _first_difference(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Describe, for an error message, the smallest id that does not stand for the same token in
    both vocabularies (token -> id); None if they are the same. `own` is the trained model's."""
    ours, theirs = ({number: token for token, number in v.items()} for v in (own, other))
    for number in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(number), theirs.get(number)
        if a != b:
            told = ("nothing" if token is None else repr(token) for token in (b, a))
            return "its token {} is {}, the trained model's is {}".format(number, *told)
    return None
