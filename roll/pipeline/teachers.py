"""Several teachers, each for the rows of its tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from roll.config.algorithm.divergences import LessonConfig
from roll.config.model import ModelConfig
from roll.config.roles import Role
from roll.config.training import TeacherRole
from roll.core.batches import TrainBatch
from roll.core.errors import ConfigError
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.models.load import load_tokenizer
from roll.workers.model import TrainWorker
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
    lesson: LessonConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> Cluster[TeacherWorker]:
    """A teacher of whole distributions."""
    place = Placement(Role.TEACHER, pool=role.pool, seed=seed, label=name)
    return launcher.start(TeacherWorker, place, role, lesson, num_tokens(tokenizer))


def introduce(students: Cluster[Any], teachers: Mapping[str, Cluster[TeacherWorker]]) -> None:
    """Hand the teachers' heads to the students."""
    heads = {name: cluster.call(TeacherWorker.output_head) for name, cluster in teachers.items()}
    students.call(TrainWorker.meet_teachers, heads)


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
    ours, theirs = (_by_id(vocab) for vocab in (own, other))
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return f"its token {number} is {b!r}, the trained model's is {a!r}"
    if len(ours) != len(theirs):
        return f"its tokenizer has {len(theirs)} tokens, the trained model's {len(ours)}"
    return None


def _by_id(vocab: Mapping[str, int]) -> Sequence[str]:
    return sorted(vocab, key=lambda token: vocab[token])
