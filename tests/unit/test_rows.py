"""Branches of episodes become rows: each once, with what its sample has, divided over all ranks."""

from __future__ import annotations

from array import array
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.algorithm import Aggregation
from roll.core.completion import NOBODY, Completion, FinishReason
from roll.core.types import Prompt, Sample
from roll.pipeline.updates import updates
from roll.rollout.assemble import assemble
from roll.rollout.dense import dense
from roll.rollout.rows import with_rows_of_branches
from roll.rollout.types import Group, ScoredSample


def row_of(name: str, first: int, versions: list[int]) -> Sample:
    """A sample whose tokens count up from `first`."""
    prompt = Prompt("p:0", (first,), "", "", "")
    tokens = range(first + 1, first + 1 + len(versions))
    completion = Completion.of(tokens, [0.0] * len(versions), versions, FinishReason.STOP)
    return Sample(name, "0", prompt, completion, "")


VERSIONS = st.lists(st.sampled_from([2, 3, NOBODY]), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    st.lists(st.lists(VERSIONS, min_size=1, max_size=4), min_size=2, max_size=6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.data(),
)
def test_each_row_is_trained_once_with_the_advantage_of_its_sample(
    episodes: list[list[list[int]]], num_updates: int, ranks: int, data: st.DataObject
) -> None:
    first, samples, expected = 10, [], Counter[tuple[tuple[int, ...], float]]()
    for i, rows in enumerate(episodes):
        made = []
        for versions in rows:
            made.append(row_of(f"0/{i}", first, versions))
            own = tuple(first + 1 + j for j, v in enumerate(versions) if v != NOBODY)
            if own:
                expected[own, float(i + 1)] += 1
            first += 10
        failed = ("judge",) if data.draw(st.booleans()) else ()
        if failed:
            for versions, sample in zip(rows, made, strict=True):
                start = sample.prompt.tokens[0] + 1
                own = tuple(start + j for j, v in enumerate(versions) if v != NOBODY)
                expected.pop((own, float(i + 1)), None)
        samples.append(ScoredSample(made[0], 1.0, failed=failed, branches=tuple(made[1:])))
    table = assemble([Group(samples[0].sample.prompt, tuple(samples), 0)])
    advantages = torch.arange(1, len(samples) + 1).float()
    table = with_rows_of_branches(
        type(table)(**{**vars(table), "advantages": advantages}), num_updates * ranks
    )
    several = any(len(rows) > 1 for rows in episodes)
    assert table.branches is None
    assert len(table) >= sum(map(len, episodes))
    if not several:
        return
    seen = Counter[tuple[tuple[int, ...], float]]()
    for update in updates(
        table, num_updates=num_updates, ranks=ranks, aggregation=Aggregation.TOKEN_MEAN
    ):
        for part in update.split(ranks):
            batch = dense(part)
            assert batch.advantages is not None
            for i in range(len(part)):
                mask = batch.loss_mask[i]
                if mask.any():
                    own = tuple(batch.tokens[i][mask].tolist())
                    (advantage,) = set(batch.advantages[i][mask].tolist())
                    seen[own, advantage] += 1
    assert seen == expected


def test_a_table_without_branches_is_left_alone() -> None:
    sample = ScoredSample(row_of("0/0", 1, [2]), 1.0)
    table = assemble([Group(sample.sample.prompt, (sample,), 0)])
    assert with_rows_of_branches(table, 7) is table
    assert table.prompts[0] == array("i", [1])
