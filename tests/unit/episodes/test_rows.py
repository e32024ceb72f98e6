"""Branches of episodes become rows: each once, with what its sample has, divided over all ranks."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.algorithms.advantages.gae import Gae
from roll.algorithms.advantages.group import Grpo
from roll.algorithms.advantages.reinforce import Reinforce
from roll.algorithms.advantages.turns.gigpo import Gigpo
from roll.algorithms.advantages.turns.turn_gae import TurnGae
from roll.algorithms.shaping.build import build_shaping
from roll.config.algorithm import Aggregation, AlgorithmConfig
from roll.config.algorithm.advantages import (
    GaeConfig,
    GigpoConfig,
    GrpoConfig,
    ReinforceConfig,
    TurnGaeConfig,
)
from roll.config.sections.environment import EnvironmentConfig
from roll.core.batches import RolloutBatch
from roll.core.completion import NOBODY, Completion, FinishReason, VersionRuns, Written
from roll.core.types import Prompt, Sample
from roll.envs.observed import Observed
from roll.pipeline.updates import updates, weighed
from roll.rollout.assemble import assemble
from roll.rollout.dense import dense
from roll.rollout.episodes.results import End, samples_of_episode
from roll.rollout.episodes.transcript import Transcript
from roll.rollout.rows import JoinedRows, with_rows_of_branches
from roll.rollout.types import Group, GroupTask, ScoredSample


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


TURN = st.tuples(
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.5, -1.0]),
    st.sampled_from(["a", "b", ""]),
)
"""Tokens of a turn, tokens said before the next one, reward, and state in which the turn began."""
TASK = GroupTask(Prompt("p:0", (), "", "", ""), 0)


def episode_of(turns: list[tuple[int, int, float, str]]) -> Transcript:
    """An episode in one row; the policy writes the tokens from 100 on."""
    row, token = Transcript(array("i", [7, 8]), ""), 100
    for number, (size, said, reward, state) in enumerate(turns):
        tokens = array("i", range(token, token + size))
        written = Written(tokens, array("f", [-0.5] * size), "x")
        row.wrote(written, VersionRuns(((3, size),)), state, number)
        row.paid(reward)
        token += size
        if number < len(turns) - 1:
            row.heard(Observed(array("i", [9] * said), ""))
    return row


def batch_of(
    episodes: list[Transcript], rows: str, credit: str, failed: int, estimator: Any
) -> RolloutBatch:
    """The rows of a step with advantages."""
    config = EnvironmentConfig.model_validate({"env": "x", "rows": rows, "credit": credit})
    samples = [
        one
        for i, episode in enumerate(episodes)
        for one in samples_of_episode([episode], End("e", config, {}, False), f"0/{i}", TASK, 0)
    ]
    if failed < len(samples) - 1:
        samples[failed] = replace(samples[failed], failed=("judge",))
    table = assemble([Group(TASK.prompt, tuple(samples[i : i + 2]), 0) for i in (0, 2)])
    found = with_rows_of_branches(table, 4)
    batch = dense(found)
    batch = replace(
        batch,
        values=(batch.tokens % 7).float() / 7,
        old_logprobs=-(batch.tokens % 5).float() / 5,
        ref_logprobs=-(batch.tokens % 3).float() / 3,
    )
    if table.branches is None:
        return SHAPING.add_advantages(batch, estimator)[0]
    joined = JoinedRows.of(table, found)
    return joined.part(SHAPING.add_advantages(joined.join(batch), estimator)[0], batch)


SHAPING = build_shaping(
    AlgorithmConfig.model_validate(
        {
            "masks": ({"kind": "overlong"},),
            "sample_weights": ({"kind": "length", "max": 2.0, "min": 0.5},),
            "kl_in_reward": {"coef": 0.1},
            "reward_shaping": ({"kind": "overlong_penalty", "buffer_tokens": 6},),
        },
        strict=False,
    ),
    max_new_tokens=8,
    episodes=True,
)


def of_tokens(batch: RolloutBatch) -> dict[tuple[int, int], tuple[float, ...]]:
    """Sampled token and its episode -> what is trained with it."""
    assert batch.advantages is not None
    assert batch.sample_weights is not None
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for row, place in batch.loss_mask.nonzero().tolist():
        key = int(batch.sample_ids[row].rpartition("/")[2]), int(batch.tokens[row, place])
        assert key not in found, "no token twice"
        target = 0.0 if batch.returns is None else batch.returns[row, place].item()
        numbers = batch.advantages[row, place].item(), target, batch.sample_weights[row].item()
        found[key] = tuple(round(number, 4) for number in numbers)
    assert bool(((batch.advantages != 0) <= batch.loss_mask).all())
    return found


@pytest.mark.parametrize(
    "estimator",
    [
        Gigpo(GigpoConfig(gamma=0.9)),
        TurnGae(TurnGaeConfig(gamma=0.9, turn_lambda=0.8)),
        TurnGae(TurnGaeConfig(token_lambda=0.9)),
        Gae(GaeConfig(gamma=0.9)),
        Reinforce(ReinforceConfig(gamma=0.9)),
        Grpo(GrpoConfig()),
    ],
    ids=lambda each: type(each).__name__,
)
@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=4, max_size=4),
    st.sampled_from(["episode", "turns"]),
    st.integers(0, 9),
)
def test_credit_does_not_depend_on_the_rows_that_an_episode_is_cut_into(
    estimator: Any, turns: list[list[tuple[int, int, float, str]]], credit: str, failed: int
) -> None:
    episodes = [episode_of(each) for each in turns]
    whole = of_tokens(batch_of(episodes, "contexts", credit, failed, estimator))
    parts = of_tokens(batch_of(episodes, "turns", credit, failed, estimator))
    assert parts == whole
    assert whole


@pytest.mark.parametrize(
    "mode", [Aggregation.TOKEN_MEAN, Aggregation.SEQUENCE_SUM, Aggregation.CONSTANT]
)
@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=4, max_size=4))
def test_sums_over_samples_do_not_depend_on_their_rows(
    mode: Aggregation, turns: list[list[tuple[int, int, float, str]]]
) -> None:
    def weights(rows: str) -> list[float]:
        episodes = [episode_of(each) for each in turns]
        batch = batch_of(episodes, rows, "episode", 9, Grpo(GrpoConfig()))
        found = weighed(batch, mode, 16).token_weights
        assert found is not None
        return sorted(found[batch.loss_mask].tolist())

    assert weights("turns") == pytest.approx(weights("contexts"))


def test_turns_of_conversations_that_alternate_keep_their_order() -> None:
    first, second = Transcript(array("i", [1]), ""), Transcript(array("i", [2]), "")
    for number, row in enumerate([first, second, first]):
        row.wrote(
            Written(array("i", [10 + number]), array("f", [0.0]), ""),
            VersionRuns(((0, 1),)),
            "",
            number,
        )
        row.paid(float(number))
        row.heard(Observed(array("i", [3]), ""))
    config = EnvironmentConfig(env="x")
    (one,) = samples_of_episode([first, second], End("e", config, {}, False), "0/0", TASK, 0)
    table = assemble([Group(TASK.prompt, (one,), 0)])
    found = with_rows_of_branches(table, 1)
    joined = JoinedRows.of(table, found).join(dense(found))
    assert joined.tokens.tolist() == [[1, 10, 11, 3, 12, 3, 3]]
    assert joined.loss_mask.tolist() == [[False, True, True, False, True, False, False]]
    assert joined.turns is not None
    assert [(turn.begin, turn.reward) for turn in joined.turns[0]] == [(1, 0), (2, 1), (4, 2)]


def test_the_tokens_of_a_sample_are_those_of_all_its_rows() -> None:
    rows = [row_of("0/0", 10, [2, 2, NOBODY]), row_of("0/0", 20, [2]), row_of("0/0", 30, [2, 2])]
    samples = ScoredSample(rows[0], 1.0, branches=tuple(rows[1:])), ScoredSample(rows[1], 0.0)
    table = assemble([Group(TASK.prompt, samples, 0)])
    assert table.trained_tokens().tolist() == [5, 1]
    first = table.keep(torch.tensor([True, False]))
    assert first.trained_tokens().tolist() == [5, 0]
    assert first.keep(torch.tensor([False, True])).trained_tokens().tolist() == [0, 0]
