"""Any mixture of rows, with and without pictures, through assembly, branches, updates and ranks."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.algorithm import Aggregation
from roll.core.batches import RolloutBatch
from roll.core.pictures import Pictures, PromptTokens
from roll.core.sample_table import SampleTable
from roll.core.types import Prompt, Sample
from roll.pipeline.updates import updates
from roll.rollout.assemble import assemble
from roll.rollout.dense import dense
from roll.rollout.rows import with_rows_of_branches
from roll.rollout.types import Group, ScoredSample
from tests.fakes import completion


class Stored:
    """Patches in a store; dead when no address of them is left."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def get(self) -> Any:
        return self.values


@dataclass(frozen=True)
class Case:
    """Pictures of each prompt, of each branch of its samples, and how the step is divided."""

    pictures: list[list[int]]
    siblings: int
    branches: list[int]
    """Number of pictures of each branch of the first sample of each prompt."""
    rejected: set[int]
    ranks: int


@st.composite
def cases(draw: Any) -> Case:
    ranks = draw(st.integers(1, 3))
    prompts = draw(st.integers(1, 4)) * ranks
    sizes = st.lists(st.integers(0, 3), min_size=prompts, max_size=prompts)
    counted = draw(sizes)
    pictures = [[10 * i + j for j in range(count)] for i, count in enumerate(counted)]
    branches = draw(st.lists(st.integers(0, 2), max_size=3))
    rejected = draw(st.sets(st.integers(0, prompts - 1), max_size=prompts - 1))
    return Case(pictures, draw(st.integers(1, 3)), branches, rejected, ranks)


def _pictures(numbers: Sequence[int], alive: list[weakref.ref[Stored]]) -> Pictures | None:
    if not numbers:
        return None
    stored = Stored(np.array([[number] for number in numbers], dtype=np.uint8))
    alive.append(weakref.ref(stored))
    return Pictures(tuple(range(len(numbers))), ((1, 1, 1),) * len(numbers), stored)


def _group(number: int, case: Case, alive: list[weakref.ref[Stored]]) -> Group:
    """A group whose tokens name the prompt, and whose pictures name it, too."""
    tokens = [number + 1] * (3 + number % 3)
    prompt = Prompt(
        f"s:{number}",
        PromptTokens.of(tokens) if case.pictures[number] else tuple(tokens),
        "",
        "",
        "t",
        pictures=_pictures(case.pictures[number], alive),
    )
    samples = []
    for sibling in range(case.siblings):
        own = Sample(
            f"{number}/{sibling}", str(number), prompt, completion(*range(1 + sibling)), ""
        )
        branches = [
            replace(
                own,
                prompt=replace(
                    prompt, pictures=_pictures([100 + number] * count, alive), tokens=(200, number)
                ),
            )
            for count in (case.branches if sibling == 0 else [])
        ]
        samples.append(ScoredSample(own, float(sibling), branches=tuple(branches)))
    return Group(prompt, tuple(samples), 0)


def _check(batch: RolloutBatch, case: Case) -> int:
    """See that every row has the pictures that its tokens name; return how many there are."""
    found = 0
    for row in range(len(batch)):
        own = None if batch.pictures is None else batch.pictures[row]
        numbers = [] if own is None else own.patches.get()[:, 0].tolist()
        first, second = batch.tokens[row, :2].tolist()
        if first == 200:  # a branch: pictures of its own, as many as its place says
            assert set(numbers) <= {100 + second}
        else:
            assert numbers == case.pictures[first - 1]
        found += len(numbers)
    return found


@pytest.fixture(scope="module")
def few_objects() -> None:
    """Leave all objects of earlier tests out of collections of garbage: with them, each takes more
    than a second, and a collection follows each example."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("few_objects")
@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_rank_gets_the_pictures_of_its_rows_and_nothing_is_left(case: Case) -> None:
    alive: list[weakref.ref[Stored]] = []
    _one_step(case, alive)
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def _one_step(case: Case, alive: list[weakref.ref[Stored]]) -> None:
    prompts = range(len(case.pictures))
    groups = [_group(i, case, alive) for i in prompts]
    kept = [group for i, group in enumerate(groups) if i not in case.rejected]
    del groups
    table = assemble(kept)
    rows = with_rows_of_branches(table, case.ranks)
    if len(rows) % case.ranks:  # only tables with branches are filled up
        rows = rows.select(range(len(rows) - len(rows) % case.ranks))
    if not len(rows):
        return
    wanted = _check(dense(rows), case)
    for update in updates(
        rows, num_updates=1, ranks=case.ranks, aggregation=Aggregation.TOKEN_MEAN
    ):
        assert isinstance(update, SampleTable)
        parts = [dense(part) for part in update.split(case.ranks)]
        assert sum(_check(part, case) for part in parts) == wanted
        for part in parts:
            inputs = part.inputs()
            assert inputs.pictures is part.pictures
            assert part.trained_inputs().pictures is part.pictures


def test_siblings_share_one_address_and_it_is_sent_once() -> None:
    alive: list[weakref.ref[Stored]] = []
    one = assemble([_group(0, Case([[1, 2]], 2, [], set(), 1), alive)])
    many = assemble([_group(0, Case([[1, 2]], 64, [], set(), 1), alive)])
    assert one.pictures is not None
    assert one.pictures[0] is one.pictures[1]
    # Of 62 more samples, without any more pictures.
    assert len(pickle.dumps(many.pictures)) - len(pickle.dumps(one.pictures)) < 62 * 3


def test_a_table_without_pictures_has_no_such_column() -> None:
    alive: list[weakref.ref[Stored]] = []
    table = assemble([_group(0, Case([[]], 2, [1], set(), 1), alive)])
    assert table.pictures is None
    rows = with_rows_of_branches(table, 1)
    assert rows.pictures is not None
    assert [own is not None for own in rows.pictures] == [False, True, False]
    assert torch.equal(rows.response_tokens, torch.tensor([1, 1, 2]))
