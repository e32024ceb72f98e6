"""Teachers of a run: each answers for the rows with its tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from roll.config.algorithm.divergences import DistillTargetConfig
from roll.config.run import RunConfig
from roll.config.sections.data import TemplateConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.config.sections.training import TeacherRole
from roll.core.batches import RolloutBatch, TeacherColumn, TokenColumn, TrainBatch
from roll.core.errors import ConfigError, DataError
from roll.data.chat.other_tokens import OtherTokens, beginning, check_same_text
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
    """Start the cluster of a teacher from whose whole distributions students learn; `tokenizer` is
    that of the teacher."""
    place = Placement(Role.TEACHER, pool=role.pool, seed=seed, label=name, env=role.env)
    return launcher.start(TeacherWorker, place, role, target, num_tokens(tokenizer))


def other_tokens(
    teachers: Mapping[str, TeacherRole],
    target: DistillTargetConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    template: TemplateConfig,
) -> dict[str, OtherTokens]:
    """Return, by name, the ways of rows to those teachers that have other tokens than the student;
    `check_others` has looked whether they may.

    Args:
        target: settings of what the teachers send; None if they send only log-probs.
        tokenizer: tokenizer of the student.
        template: chat template of the rows.
    """
    found: dict[str, OtherTokens] = {}
    if target is None or not target.any_tokens:
        return found
    own = tokenizer.get_vocab()
    for name, role in teachers.items():
        theirs = load_tokenizer(role.model)
        if _first_difference(own, theirs.get_vocab()):
            found[name] = OtherTokens(tokenizer, theirs, beginning(theirs, template))
    return found


@dataclass(frozen=True, slots=True)
class Teachers:
    """All teachers of a run, with their clusters."""

    roles: Mapping[str, TeacherRole]
    clusters: Mapping[str, Cluster[Any]]
    """Name of the teacher -> its cluster: of `TeacherWorker`s for `outputs` and `introduce`, of
    `ReferenceWorker`s for `logprobs`."""
    colocation: Colocation
    others: Mapping[str, OtherTokens] = field(default_factory=dict)
    """Name of a teacher that has other tokens than the students -> the way of rows to it."""

    def logprobs(self, batch: RolloutBatch, tags: Sequence[str]) -> Tensor:
        """Return the log-probs of the response tokens under the teacher of each row's tag, float32
        `[B, T]`."""

        def ask(name: str, rows: RolloutBatch) -> list[Tensor]:
            cluster = self.clusters[name]
            scored: TokenColumn = cluster.call(ReferenceWorker.logprobs, rows.inputs())
            return list(scored.aligned(rows))

        return torch.stack(self._ask(batch, tags, ask))

    def outputs(self, batch: TrainBatch, tags: Sequence[str]) -> list[Any]:
        """Return a `RemoteValue` of a `TeacherRow` for each row: the output of the teacher of the
        row's tag, for the trained tokens. A teacher with other tokens says nothing of those trained
        tokens with which none of its own begins."""

        def ask(name: str, rows: TrainBatch) -> list[Any]:
            asked = rows.trained_inputs()
            if name in self.others:
                asked = self.others[name].rows(asked)
            found: TeacherColumn = self.clusters[name].call(TeacherWorker.outputs, asked)
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

    def _ask(self, batch: B, tags: Sequence[str], ask: Callable[[str, B], Sequence[A]]) -> list[A]:
        """Ask each teacher about its rows, with the teacher on its devices; see `ask_teachers`."""

        def ask_one(name: str, rows: B) -> Sequence[A]:
            with self.colocation.use(f"teachers.{name}"):
                return ask(name, rows)

        ranks = {name: cluster.dp_size for name, cluster in self.clusters.items()}
        return ask_teachers(batch, by_teacher(tags, self.roles), ranks, ask_one)


def check_others(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    target: DistillTargetConfig | None,
    key: str,
    template: TemplateConfig | None = None,
) -> None:
    """Raise ConfigError unless teachers, reward models and opponents know the tokens of the trained
    model, or, of teachers, at least the text.

    Args:
        tokenizer: tokenizer of the trained model.
        target: settings of what the teachers send; None if they send only log-probs.
        key: key of `target` in the config, for error messages.
        template: chat template of the rows; None if teachers cannot have other tokens.

    Raises:
        ConfigError: one of these has other tokens, and is no teacher that may; or a teacher would
            read another text than the student, or fails `check_distill_target`.
    """
    teachers, rewards, opponents = (
        {key: model for key, model in config.models.items() if key.startswith(kind)}
        for kind in ("teachers.", "rewards.", "opponents.")
    )
    others: dict[str, ModelConfig] = {}
    if template is not None and target is not None and target.any_tokens:
        own = tokenizer.get_vocab()
        others = {
            name: model
            for name, model in teachers.items()
            if _first_difference(own, load_tokenizer(model).get_vocab())
        }
        for name, model in others.items():
            _check_text(name, tokenizer, load_tokenizer(model), template)
            check_distill_target(target, key, load_tokenizer(model), {name: model})
    same = {name: model for name, model in teachers.items() if name not in others}
    require_same_tokens(config.train_model, same | rewards | opponents)
    if target is not None:
        check_distill_target(target, key, tokenizer, {"model": config.train_model} | same)


def _check_text(
    key: str,
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    template: TemplateConfig,
) -> None:
    """Raise ConfigError unless a teacher, `key` in the config, reads the text of the student."""
    try:
        check_same_text(student, teacher, template)
    except DataError as error:
        raise ConfigError(f"{key}: has other tokens than the student, and {error}") from None


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
            hint = " or, for a distill loss, `divergence: {kind: uld}`"
            advice = hint if key.startswith("teachers.") else ""
            raise ConfigError(f"{key}: {difference}; use a model of the same family{advice}")


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
