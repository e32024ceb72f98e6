"""Each row goes to the teacher of its tag, and comes back to its place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from roll.config.model import ModelConfig
from roll.config.training import TeacherRole
from roll.core.batches import RolloutBatch
from roll.core.errors import DataError
from roll.pipeline.teachers import teacher_logprobs
from tests.tiny import rollout_batch


def teacher(*tags: str) -> TeacherRole:
    return TeacherRole(pool="p", model=ModelConfig(path="m"), tags=tags)


def test_rows_go_to_the_teacher_of_their_tag_in_numbers_that_divide() -> None:
    batch = replace(rollout_batch(5), tags=["a", "b", "c", "b", "a"])
    sizes = {}

    def score(name: str, rows: RolloutBatch) -> torch.Tensor:
        sizes[name] = len(rows)
        return rows.tokens.float() * (1 if name == "first" else -1)

    teachers = {"first": teacher("a", "c"), "second": teacher("b")}
    found_BT = teacher_logprobs(batch, teachers, {"first": 2, "second": 3}, score)
    signs = torch.tensor([1.0, -1, 1, -1, 1])[:, None]
    assert torch.equal(found_BT, batch.tokens * signs)
    assert sizes == {"first": 4, "second": 3}


def test_a_tag_without_a_teacher_is_named() -> None:
    batch = replace(rollout_batch(2), tags=["a", "x"])
    with pytest.raises(DataError, match="the tag 'x', which no teacher takes"):
        teacher_logprobs(batch, {"t": teacher("a")}, {"t": 1}, lambda _, rows: rows.tokens.float())
