"""Each row goes to the teacher of its tag, and comes back to its place."""

from __future__ import annotations

import pytest
import torch

from roll.config.model import ModelConfig
from roll.config.training import TeacherRole
from roll.core.batches import RolloutBatch
from roll.core.errors import DataError
from roll.data.datasets import Dataset, Source
from roll.data.examples import Example
from roll.pipeline.data import check_tags
from roll.pipeline.teachers import ask_teachers, by_teacher
from tests.tiny import rollout_batch


def teacher(*tags: str) -> TeacherRole:
    return TeacherRole(pool="p", model=ModelConfig(path="m"), tags=tags)


def test_rows_go_to_the_teacher_of_their_tag_in_numbers_that_divide() -> None:
    batch = rollout_batch(5)
    sizes = {}

    def ask(name: str, rows: RolloutBatch) -> list[torch.Tensor]:
        sizes[name] = len(rows)
        return list(rows.tokens * (1 if name == "first" else -1))

    teachers = {"first": teacher("a", "c"), "second": teacher("b")}
    rows_of = by_teacher(["a", "b", "c", "b", "a"], teachers)
    found = ask_teachers(batch, rows_of, {"first": 2, "second": 3}, ask)
    signs = torch.tensor([1, -1, 1, -1, 1])[:, None]
    assert torch.equal(torch.stack(found), batch.tokens * signs)
    assert sizes == {"first": 4, "second": 3}


def test_a_tag_without_a_teacher_is_named() -> None:
    items = tuple(Example(f"set:{i}", (), tag=tag) for i, tag in enumerate("ax"))
    dataset = Dataset((Source("set", 1.0, items),), (), "")
    with pytest.raises(DataError, match=r"set:1 has the tag 'x', which no teacher takes .* a\)"):
        check_tags(dataset, "teacher", [teacher("a")])
