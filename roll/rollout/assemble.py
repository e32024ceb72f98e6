"""Conversion of scored groups into the table of samples and into the metrics of a step."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from roll.core.completion import NOBODY, TOKEN_TYPE
from roll.core.metrics import Last, Max, Mean, Metric, Metrics, Sum
from roll.core.pictures import PromptTokens
from roll.core.sample_table import Branch, SampleTable
from roll.core.types import Prompt, Sample
from roll.rollout.filters import DROPPED
from roll.rollout.types import Group, ScoredSample

T = TypeVar("T")


def assemble(
    groups: Sequence[Group],
    reward_weights: Mapping[str, float] | Callable[[str], Mapping[str, float]] | None = None,
    temperature: Callable[[str], float] | None = None,
) -> SampleTable:
    """Make the table of a step: one row per sample, in the order of groups and siblings.

    `group_ids` are unique in this table only. A row is not trained
    on if a reward of it or of its greedy baseline failed (then `has_reward` is False).

    Args:
        groups: groups to train on, with at least one sample.
        reward_weights: weight of each reward of the run by its name, in the order of the columns of
            `named_rewards`, or a function that returns these for a tag; without it the table has no
            `named_rewards`.
        temperature: function that returns the sampling temperature of a tag; without it the table
            has no `temperatures`, and all samples are of the temperature of the run.

    Raises:
        ValueError: there are no samples, or only some samples of a tag have a greedy baseline.
    """
    rows = [scored for group in groups for scored in group.samples]
    if not rows:
        raise ValueError("assemble got no samples; a step needs at least one group")
    samples = [scored.sample for scored in rows]
    prompts = _prompts(samples)
    versions = [sample.completion.versions for sample in samples]
    all_sampled = all(sample.num_sampled_tokens == len(sample.completion) for sample in samples)
    greedy = [group.baseline for group in groups for _ in group.samples]
    pairs = zip(rows, greedy, strict=True)
    has_reward = torch.tensor([s.has_reward and (g is None or g.has_reward) for s, g in pairs])
    named, weights = _named_rewards(rows, reward_weights)
    tags = [sample.tag for sample in samples]
    responses = torch.tensor([sample.num_response_tokens for sample in samples])
    return SampleTable(
        sample_ids=[sample.id for sample in samples],
        tags=tags,
        prompts=prompts,
        contents=[sample.completion.content for sample in samples],
        pictures=_if_any([sample.prompt.pictures for sample in samples]),
        versions=None if all_sampled else versions,
        group_ids=_group_ids(groups),
        lengths=torch.tensor(list(map(len, prompts))) + responses,
        response_tokens=responses,
        row_tokens=_row_tokens(rows),
        trained=has_reward,
        has_reward=None if has_reward.all() else has_reward,
        rewards=torch.tensor([scored.reward for scored in rows], dtype=torch.float32),
        turn_rewards=_turn_rewards(rows),
        named_rewards=named,
        reward_weights=weights,
        steps=_if_any([scored.steps for scored in rows]),
        turns=_if_any([scored.turns for scored in rows]),
        branches=_branches(rows),
        baseline_rewards=_baseline_rewards(greedy, tags),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        temperatures=None if temperature is None else torch.tensor(list(map(temperature, tags))),
    )


def rollout_metrics(groups: Sequence[Group], *, current_version: int) -> Metrics:
    """Return metrics on the rewards, lengths and staleness of the groups that are trained on.
    Episodes that failed have no length.

    Args:
        groups: groups of the step, at least one.
        current_version: version of the trainer's weights. The staleness of a token is this version
            minus the version that generated the token.
    """
    rows = [scored for group in groups for scored in group.samples]
    whole = _whole(rows)
    lags = Counter[int]()
    for sample in (row for scored in rows for row in scored.rows):
        for version, count in sample.completion.versions.runs:
            if version != NOBODY:
                lags[current_version - version] += count
    metrics: dict[str, Metric] = {
        "response_tokens/mean": _mean(map(_response_tokens, whole)),
        "prompt_tokens/mean": _mean(len(scored.sample.prompt.tokens) for scored in whole),
        "truncated_fraction": _mean(scored.sample.truncated for scored in whole),
        "response_tokens/max": Max(max(map(_response_tokens, rows))),
        "samples/left_out": Sum(sum(not scored.has_reward for scored in rows)),
        "groups/equal_rewards_fraction": _mean(group.equal_rewards for group in groups),
        "staleness/mean": Mean(float(sum(lag * n for lag, n in lags.items())), lags.total()),
        "staleness/max": Max(max(lags, default=0)),
    }
    dropped = sum(DROPPED in scored.failed for scored in rows)
    if dropped:
        metrics["samples/dropped"] = Sum(dropped)
    return reward_metrics(rows) | metrics | _tag_metrics(groups)


def with_answers(
    table: SampleTable, groups: Sequence[Group], answer: Callable[[Prompt], array[int]]
) -> tuple[SampleTable, Metrics]:
    """Return the table of these groups with the `answers` of the data set, and their lengths
    (`answer_tokens/mean` and `answer_tokens/max`); `answer` returns the tokens of one."""
    answers = [one for group in groups for one in [answer(group.prompt)] * len(group.samples)]
    sizes = list(map(len, answers))
    mean, longest = _mean(sizes), Max(max(sizes))
    metrics = Metrics({"answer_tokens/mean": mean, "answer_tokens/max": longest})
    return replace(table, answers=answers), metrics


def reward_metrics(rows: Sequence[ScoredSample]) -> Metrics:
    """Return the metrics of the rewards of `rows`.

    Keys: `reward/mean` and `reward/std`, the total reward over all samples (the variance divides by
    n); `reward/<name>/mean`, one reward before its weight; `reward/<name>/<part>`, one part of a
    reward; `reward/tag/<tag>/mean`, the total reward of one tag, if there are several tags;
    `process/reward_mean` and `process/steps_mean`, sum and number of the rewards of steps. A
    sample without a total reward counts only for the rewards that gave it a score. A key is missing
    if no sample counts for it.
    """
    totals = [scored.score for scored in rows if scored.has_reward]
    named: dict[str, list[float]] = defaultdict(list)
    by_tag: dict[str, list[float]] = defaultdict(list)
    for scored in rows:
        if scored.has_reward:
            by_tag[scored.sample.tag].append(scored.score)
        for name, score in scored.by_name.items():
            named[f"reward/{name}/mean"].append(score)
        for name, part in scored.parts.items():
            named[f"reward/{name}"].append(part)
    if len(by_tag) > 1:
        named.update({f"reward/tag/{tag}/mean": scores for tag, scores in by_tag.items()})
    if not totals:
        return Metrics({name: _mean(values) for name, values in named.items()})
    mean = math.fsum(totals) / len(totals)
    variance = math.fsum((total - mean) ** 2 for total in totals) / len(totals)
    with_steps = [scored.steps for scored in rows if scored.steps is not None]
    if with_steps:
        named["process/reward_mean"] = [steps.total for steps in with_steps]
        named["process/steps_mean"] = [float(len(steps)) for steps in with_steps]
    return Metrics(
        {
            **{name: _mean(values) for name, values in named.items()},
            "reward/mean": _mean(totals),
            "reward/std": Last(math.sqrt(variance)),
        }
    )


def _group_ids(groups: Sequence[Group]) -> Tensor:
    """Return a number for each group, int64 `[B]`; players of one game have different numbers."""
    players = 1 + max(scored.seat for group in groups for scored in group.samples)
    ids = [i * players + scored.seat for i, group in enumerate(groups) for scored in group.samples]
    return torch.tensor(ids)


def _if_any(column: list[T]) -> list[T] | None:
    """Return the column, or None if no sample has anything in it."""
    return column if any(column) else None


def _turn_rewards(rows: Sequence[ScoredSample]) -> Tensor | None:
    """Return the sum of the rewards of turns of each sample, float32 `[B]`; None without any."""
    found = _if_any([scored.turn_reward for scored in rows])
    return None if found is None else torch.tensor(found, dtype=torch.float32)


def _row_tokens(rows: Sequence[ScoredSample]) -> Tensor | None:
    """Return the number of tokens of the longest row of each sample, int64 `[B]`; None if each has
    one row."""
    if not any(scored.branches for scored in rows):
        return None
    sizes = [
        max(len(row.prompt.tokens) + row.num_response_tokens for row in scored.rows)
        for scored in rows
    ]
    return torch.tensor(sizes)


def _branches(rows: Sequence[ScoredSample]) -> list[tuple[Branch, ...]] | None:
    """Return the further rows of each sample; None if there are none."""
    if not any(scored.branches for scored in rows):
        return None
    return [
        tuple(
            Branch(
                array(TOKEN_TYPE, one.prompt.tokens),
                one.completion.content,
                one.completion.versions,
                one.prompt.pictures,
            )
            for one in scored.branches
        )
        for scored in rows
    ]


def _prompts(samples: Sequence[Sample]) -> list[array[int]]:
    """Return the tokens of each prompt; samples of one prompt share an array."""
    arrays: dict[int, array[int]] = {}
    for sample in samples:
        if id(sample.prompt) not in arrays:
            found = sample.prompt.tokens
            arrays[id(sample.prompt)] = (
                found if isinstance(found, PromptTokens) else array(TOKEN_TYPE, found)
            )
    return [arrays[id(sample.prompt)] for sample in samples]


def _tag_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """Return `tag/<tag>/...`: the share of the samples, and metrics of the rollout of one tag;
    nothing if all groups have one tag."""
    by_tag: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_tag[group.prompt.tag].append(group)
    if len(by_tag) < 2:
        return {}
    metrics: dict[str, Metric] = {}
    total = sum(len(group.samples) for group in groups)
    for tag, own in sorted(by_tag.items()):
        rows = [scored for group in own for scored in group.samples]
        whole = _whole(rows)
        of_tag = {
            "samples_fraction": Mean(len(rows), total),
            "response_tokens/mean": _mean(map(_response_tokens, whole)),
            "truncated_fraction": _mean(scored.sample.truncated for scored in whole),
            "groups/equal_rewards_fraction": _mean(group.equal_rewards for group in own),
        }
        metrics |= {f"tag/{tag}/{name}": metric for name, metric in of_tag.items()}
    return metrics


def _whole(rows: Sequence[ScoredSample]) -> list[ScoredSample]:
    """Return the samples that count for lengths: also those on which a reward failed, but no
    episodes that failed, in whose place is a sample without a response."""
    return [one for one in rows if one.has_reward or _response_tokens(one)]


def _response_tokens(scored: ScoredSample) -> int:
    """Return the number of tokens after the prompts, in all rows of a sample."""
    return sum(row.num_response_tokens for row in scored.rows)


def _named_rewards(
    rows: Sequence[ScoredSample],
    weights: Mapping[str, float] | Callable[[str], Mapping[str, float]] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scores and the weights of the named rewards, both float32 `[B, R]`.

    A reward that gave no score to a sample has score 0 and weight 0 there. Without `weights` both
    results are None. If `weights` is a function, it must return the same names in the same order
    for every tag.
    """
    if not weights:
        return None, None
    if isinstance(weights, Mapping):
        mine = [weights] * len(rows)
    else:
        by_tag = {tag: weights(tag) for tag in {row.sample.tag for row in rows}}
        mine = [by_tag[row.sample.tag] for row in rows]
    pairs = list(zip(rows, mine, strict=True))
    scores = [[row.by_name.get(name, 0.0) for name in own] for row, own in pairs]
    shares = [[w if n in row.by_name else 0.0 for n, w in own.items()] for row, own in pairs]
    return torch.tensor(scores, dtype=torch.float32), torch.tensor(shares, dtype=torch.float32)


def _baseline_rewards(rows: Sequence[ScoredSample | None], tags: Sequence[str]) -> Tensor | None:
    """Return the rewards of the greedy baselines, NaN for samples of tags that have none; None if
    no sample has one, ValueError if only some samples of a tag have."""
    with_one = {tag for row, tag in zip(rows, tags, strict=True) if row is not None}
    if not with_one:
        return None
    missing = sum(row is None and tag in with_one for row, tag in zip(rows, tags, strict=True))
    if missing:
        raise ValueError(f"{missing} of {len(rows)} samples have no greedy baseline")
    scored = [math.nan if row is None else row.total for row in rows]
    return torch.tensor(scored, dtype=torch.float32)


def _mean(values: Iterable[float]) -> Mean:
    """Return the mean of the values as a metric that counts each value once."""
    numbers = list(values)
    return Mean(math.fsum(numbers), len(numbers))
