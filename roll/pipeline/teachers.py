"""Several teachers, each for the samples of its tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from roll.config.model import ModelConfig
from roll.config.training import TeacherRole
from roll.core.batches import RolloutBatch
from roll.core.errors import ConfigError, DataError
from roll.models.load import load_tokenizer

Score = Callable[[str, RolloutBatch], torch.Tensor]
"""Name of a teacher and rows that divide over its ranks -> log-probs `[B, T]`."""


def teacher_logprobs(
    batch: RolloutBatch, teachers: Mapping[str, TeacherRole], ranks: Mapping[str, int], score: Score
) -> torch.Tensor:
    """Log-probs of each row by the teacher of its tag, float32 `[B, T]`.

    Args:
        ranks: of each teacher; its rows are filled up with copies until they divide.

    Raises:
        DataError: a row's tag has no teacher.
    """
    out_BT = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    left = set(range(len(batch)))
    for name, role in teachers.items():
        rows = [row for row, tag in enumerate(batch.tags) if tag in role.tags]
        if not rows:
            continue
        left.difference_update(rows)
        filled = [*rows, *[rows[-1]] * (-len(rows) % ranks[name])]
        out_BT[rows] = score(name, batch.select(filled))[: len(rows)]
    if left:
        row = min(left)
        raise DataError(
            f"sample {batch.sample_ids[row]} has the tag {batch.tags[row]!r}, which no teacher "
            "takes; add it to the `tags` of a teacher"
        )
    return out_BT


def require_same_tokens(policy: ModelConfig, others: Mapping[str, ModelConfig]) -> None:
    """What another model says of tokens means something only where its ids are the policy's.

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
            return f"its token {number} is {b!r}, the policy's is {a!r}"
    if len(ours) != len(theirs):
        return f"its tokenizer has {len(theirs)} tokens, the policy's {len(ours)}"
    return None


def _by_id(vocab: Mapping[str, int]) -> Sequence[str]:
    return sorted(vocab, key=lambda token: vocab[token])
