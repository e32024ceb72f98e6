"""Several teachers, each for the rows of its tags."""

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
from roll.core.batches import RolloutBatch, TrainBatch
from roll.core.errors import ConfigError
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.distributed.colocation import Colocation
from roll.models.load import load_config, load_tokenizer
from roll.workers.model import TrainWorker
from roll.workers.reference import ReferenceWorker
from roll.workers.teacher import TeacherWorker

B = TypeVar("B", bound=TrainBatch)
A = TypeVar("A")


def by_teacher(tags: Sequence[str], teachers: Mapping[str, TeacherRole]) -> dict[str, list[int]]:
    """Teacher -> its rows. Every tag has a teacher: `check_tags` saw to that."""
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
    """The answer of its teacher to each row, in order.

    Args:
        rows_of: each teacher's, which are all rows together.
        ranks: of each teacher; its rows are filled up with copies until they divide.
        ask: name of a teacher and rows -> an answer to each.
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
    """A teacher of whole distributions."""
    place = Placement(Role.TEACHER, pool=role.pool, seed=seed, label=name)
    return launcher.start(TeacherWorker, place, role, target, num_tokens(tokenizer))


@dataclass(frozen=True, slots=True)
class Teachers:
    """All teachers of a run."""

    roles: Mapping[str, TeacherRole]
    clusters: Mapping[str, Cluster[Any]]
    """Of `TeacherWorker`s, or of `ReferenceWorker`s where log-probs are all that is asked."""
    colocation: Colocation

    def logprobs(self, batch: RolloutBatch, tags: Sequence[str]) -> Tensor:
        """Of each token that was written, float32 `[B, T]`."""

        def ask(cluster: Cluster[Any], rows: RolloutBatch) -> list[Tensor]:
            scored = cluster.call(ReferenceWorker.add_ref_logprobs, rows)
            return list(scored.require("ref_logprobs", made_by="add_ref_logprobs"))

        return torch.stack(self._ask(batch, tags, ask))

    def outputs(self, batch: TrainBatch, tags: Sequence[str]) -> list[Any]:
        """A parcel for each row, with what is said of its trained tokens."""

        def ask(cluster: Cluster[Any], rows: TrainBatch) -> list[Any]:
            teacher_outputs = cluster.call(TeacherWorker.add_teacher_outputs, rows).teacher_outputs
            assert teacher_outputs is not None
            return teacher_outputs

        return self._ask(batch, tags, ask)

    def introduce(self, students: Cluster[Any]) -> None:
        """Hand the teachers' heads to the students."""
        heads = {}
        for name, cluster in self.clusters.items():
            with self.colocation.use(f"teachers.{name}"):
                (heads[name],) = cluster.call(TeacherWorker.output_head)
        students.call(TrainWorker.receive_teacher_heads, heads)

    def _ask(
        self, batch: B, tags: Sequence[str], ask: Callable[[Cluster[Any], B], Sequence[A]]
    ) -> list[A]:
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
    """Whether models that look at the trained one's tokens, teachers and rewards, know them.

    Args:
        target: what teachers tell, and `key` of it in the config; None where they tell log-probs.

    Raises:
        ConfigError: one does not.
    """
    teachers, rewards = (
        {key: model for key, model in config.models.items() if key.startswith(kind)}
        for kind in ("teachers.", "rewards.")
    )
    require_same_tokens(config.train_model, teachers | rewards)
    if target is not None:
        check_distill_target(target, key, tokenizer, {"model": config.train_model} | teachers)


def check_distill_target(
    target: DistillTargetConfig,
    key: str,
    tokenizer: PreTrainedTokenizerBase,
    models: Mapping[str, ModelConfig],
) -> None:
    """
    Args:
        key: of `target` in the config.
        models: key in the config -> student or teacher.

    Raises:
        ConfigError: there are fewer tokens than the target tells, or than a model must know.
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


def num_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that stands for something."""
    return 1 + max(int(number) for number in tokenizer.get_vocab().values())


def require_same_tokens(policy: ModelConfig, others: Mapping[str, ModelConfig]) -> None:
    """What another model says of tokens means something only where its ids are the student's.

    Args:
        others: key in the config -> model.

    Raises:
        ConfigError: names the first id that stands for something else.
    """
    if not others:
        return
    own = load_tokenizer(policy).get_vocab()
    for key, model in others.items():
        difference = _first_difference(own, load_tokenizer(model).get_vocab())
        if difference:
            raise ConfigError(f"{key}: {difference}; use a model of the same family")


def _first_difference(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    ours, theirs = ({number: token for token, number in v.items()} for v in (own, other))
    for number in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(number), theirs.get(number)
        if a != b:
            told = ("nothing" if token is None else repr(token) for token in (b, a))
            return "its token {} is {}, the trained model's is {}".format(number, *told)
    return None
