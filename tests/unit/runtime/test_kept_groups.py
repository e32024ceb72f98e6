"""Kept samples become the groups again that they were made of."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from roll.core.completion import Completion, FinishReason, VersionRuns, Written
from roll.core.errors import DataError
from roll.core.step_rewards import StepRewards
from roll.core.types import Prompt, Sample, Turn
from roll.rollout.types import Group, ScoredSample
from roll.runtime.rollouts.kept_groups import groups_of
from roll.runtime.sample_keeper import baseline_reward, slim
from roll.workers.sample_writer.table import table_of

PROMPT = Prompt("data:7", array("i", [1, 2]), "one two", "answer", "tag")


def row(
    name: str,
    tokens: list[int],
    runs: tuple[tuple[int, int], ...],
    prompt: Prompt = PROMPT,
    text: str = "t",
) -> Sample:
    logprobs = array("f", [0.1 * token for token in tokens])
    written = Written(array("i", tokens), logprobs, text)
    completion = Completion(written, VersionRuns(runs), FinishReason.LENGTH)
    return Sample(name, "5/data:7", prompt, completion)


def table(groups: list[Group]) -> Any:
    samples = list(slim(groups))
    return table_of(
        samples,
        step=5,
        split="train",
        sets=[None] * len(samples),
        baselines=[baseline_reward(group) for group in groups for _ in group.samples],
        read=str,
    )


def groups() -> list[Group]:
    """One of episodes, whose second sample has no reward, and one of single turns."""
    opening = replace(PROMPT, tokens=array("i", [1, 2, 3]))
    episode = ScoredSample(
        row("5/data:7/0", [5, 6, 9, 7], ((3, 2), (-1, 1), (4, 1))),
        0.1 + 0.2,
        {"env/steps": 2.0, "env/a": 1 / 3},
        {"env": 3.0},
        turns=(Turn(0, 2, 0.5, "here"), Turn(0, 1, 1.0, row=1)),
        branches=(row("5/data:7/0", [4], ((4, 1),), opening, text=""),),
        seat=1,
        steps=StepRewards.of([(2, 0.1), (4, 0.5)]),
        turn_reward=0.3,
    )
    failed = ScoredSample(row("5/data:7/1", [], ()), 0.0, failed=("broken",))
    other = replace(row("5/data:8/0", [8], ((5, 1),)), group="5/data:8")
    return [
        Group(PROMPT, (episode, failed), 5),
        Group(PROMPT, (ScoredSample(other, 1.0, by_name={"math": 2.0}),), 5),
    ]


def test_samples_of_all_kinds_come_back_as_they_were() -> None:
    assert groups_of(table(groups()), "file") == groups()


@pytest.mark.parametrize(("failed", "kept"), [((), 0.25), (("broken",), math.nan)])
def test_of_a_greedy_response_the_reward_comes_back(failed: tuple[str, ...], kept: float) -> None:
    greedy = ScoredSample(row("5/data:7/greedy", [1, 1], ((3, 2),)), 0.25, failed=failed)
    [group, _] = [replace(one, baseline=greedy) for one in groups()]
    assert baseline_reward(group) == pytest.approx(kept, nan_ok=True)
    [found, without] = groups_of(table([group, groups()[1]]), "file")
    assert found.baseline is not None
    assert found.baseline.has_reward is not bool(failed)
    if not failed:
        assert found.baseline.total == 0.25
    assert without.baseline is None


def test_a_sample_that_lacks_log_probs_is_named() -> None:
    whole = table(groups())
    place = whole.column_names.index("logprobs")
    fewer = pa.array([[0.5], [], [0.5]], type=pa.list_(pa.float32()))
    cut = whole.set_column(place, whole.field("logprobs"), fewer)
    with pytest.raises(DataError, match=r"file: sample 5/data:7/0: .* 4 tokens, 1 log-probs"):
        groups_of(cut, "file")
