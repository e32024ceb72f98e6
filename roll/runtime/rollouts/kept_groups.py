"""Conversion of a table of kept samples back into groups; `sample_writer/table.py` made it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from roll.core.completion import (
    LOGPROB_TYPE,
    TOKEN_TYPE,
    Completion,
    FinishReason,
    VersionRuns,
)
from roll.core.errors import DataError
from roll.core.step_rewards import StepRewards
from roll.core.types import Prompt, Sample, Turn
from roll.rollout.types import Group, ScoredSample

TOKENS = {"prompt_ids": TOKEN_TYPE, "response_ids": TOKEN_TYPE, "logprobs": LOGPROB_TYPE}
"""Columns with a number for each token, and the type of their arrays."""

Row = dict[str, Any]
"""Row of a table, with arrays in the columns of `TOKENS`."""


def groups_of(table: Any, where: str) -> list[Group]:
    """Return the samples of a step as groups, in the order of the table.

    Args:
        table: table with the columns of `sample_files.schema`; siblings follow one another.
        where: name of the file, for error messages.

    Raises:
        DataError: a response has not one log-prob and one version for each of its tokens.
    """
    names = [name for name in table.column_names if name != "branches"]
    rows = list(_rows({name: table[name].combine_chunks() for name in names}))
    branches = _branches(table["branches"].combine_chunks())
    groups = []
    for _, siblings in groupby(zip(rows, branches, strict=True), key=lambda pair: pair[0]["group"]):
        prompts: dict[bytes, Prompt] = {}
        samples, row = [], rows[0]
        for row, further in siblings:
            prompt = prompts.setdefault(row["prompt_ids"].tobytes(), _prompt(row))
            try:
                samples.append(_scored(row, further, prompt))
            except ValueError as error:
                raise DataError(f"{where}: sample {row['id']}: {error}") from None
        baseline = _baseline(row, samples[0].sample)
        groups.append(Group(samples[0].sample.prompt, tuple(samples), row["step"], None, baseline))
    return groups


def _rows(columns: Mapping[str, Any]) -> Iterator[Row]:
    """Return an iterator over the rows of columns of Arrow, by their names."""
    values = [
        _arrays(column, TOKENS[name]) if name in TOKENS else column.to_pylist()
        for name, column in columns.items()
    ]
    for row in zip(*values, strict=True):
        yield dict(zip(columns, row, strict=True))


def _arrays(lists: Any, kind: str) -> Iterator[array[Any]]:
    """Return an iterator over the lists of a column as arrays of this type, without a Python number
    for any token; a null is an empty one."""
    values = lists.values.to_numpy(zero_copy_only=False)
    for begin, end in pairwise(lists.offsets.to_pylist()):
        yield array(kind, values[begin:end].tobytes())


def _branches(lists: Any) -> Iterator[list[Row]]:
    """Return an iterator over the further rows of each sample."""
    names = [field.name for field in lists.type.value_type]
    rows = list(_rows({name: lists.values.field(name) for name in names}))
    for begin, end in pairwise(lists.offsets.to_pylist()):
        yield rows[begin:end]


def _scored(row: Row, branches: Sequence[Row], prompt: Prompt) -> ScoredSample:
    """Return a sample with its scores; ValueError if its columns of tokens differ in length."""
    finish, steps = FinishReason(row["finish_reason"]), row["step_rewards"]
    turns = (turn for turn in row["turns"] or () if turn["by"] == "policy")
    return ScoredSample(
        _sample(row, row, prompt, finish, row["response"]),
        # Of a sample on which a reward failed, the number has no meaning.
        0.0 if row["reward"] is None else row["reward"],
        parts=dict(row["parts"]),
        by_name=dict(row["rewards"]),
        failed=tuple(row["failed_rewards"]),
        turns=tuple(Turn(t["begin"], t["end"], t["reward"], t["state"], t["row"]) for t in turns),
        branches=tuple(_sample(row, one, _prompt(row | one), finish, "") for one in branches),
        seat=row["seat"],
        steps=None if steps is None else StepRewards.of((s["end"], s["reward"]) for s in steps),
        turn_reward=row["turn_reward"],
    )


def _sample(row: Row, tokens: Row, prompt: Prompt, finish: FinishReason, text: str) -> Sample:
    """Return a row of a sample with the tokens of `tokens`; ValueError if these columns differ in
    length."""
    runs = tuple((run["version"], run["tokens"]) for run in tokens["versions"] or ())
    written = Completion.of(tokens["response_ids"], tokens["logprobs"], VersionRuns(runs), finish)
    return Sample(row["id"], row["group"], prompt, written, text)


def _prompt(row: Row) -> Prompt:
    """Return the prompt of a row."""
    names = ("prompt_id", "prompt_ids", "prompt", "ground_truth", "tag")
    return Prompt(*(row[name] for name in names))


def _baseline(row: Row, sample: Sample) -> ScoredSample | None:
    """Return the greedy response to a prompt, of which only the reward is kept, so that it stands
    with the tokens of `sample`; None if there was none."""
    reward = row["baseline_reward"]
    if reward is None:
        return None
    failed = math.isnan(reward)
    return ScoredSample(sample, 0.0 if failed else reward, failed=("baseline",) if failed else ())
