"""Conversion of scored groups into the table of samples and into the metrics of a step."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from roll.core.completion import TOKEN_TYPE
from roll.core.metrics import Last, Max, Mean, Metric, Metrics, Sum
from roll.core.sample_table import SampleTable
from roll.rollout.types import Group, ScoredSample


def assemble(
    groups: Sequence[Group], reward_weights: Mapping[str, float] | None = None
) -> SampleTable:
    """Make the table of a step: one row per sample, in the order of groups and siblings.

    `group_ids` are positions in `groups`; they are unique in this table only. A row is not trained
    on if a reward of it or of its greedy baseline failed (then `has_reward` is False).

    Args:
        groups: groups to train on, with at least one sample.
        reward_weights: weight of each reward of the run by its name, in the order of the columns of
            `named_rewards`; without it the table has no `named_rewards`.

    Raises:
        ValueError: there are no samples, or only some samples have a greedy baseline.
    """
    rows = [scored for group in groups for scored in group.samples]
    if not rows:
        raise ValueError("assemble got no samples; a step needs at least one group")
    samples = [scored.sample for scored in rows]
    prompts = [
        prompt
        for group in groups
        for prompt in [array(TOKEN_TYPE, group.prompt.tokens)] * len(group.samples)
    ]
    greedy = [group.baseline for group in groups for _ in group.samples]
    pairs = zip(rows, greedy, strict=True)
    has_reward = torch.tensor([s.has_reward and (g is None or g.has_reward) for s, g in pairs])
    named, weights = _named_rewards(rows, reward_weights or {})
    responses = torch.tensor([sample.num_response_tokens for sample in samples])
    return SampleTable(
        sample_ids=[sample.id for sample in samples],
        tags=[sample.tag for sample in samples],
        prompts=prompts,
        contents=[sample.completion.content for sample in samples],
        group_ids=torch.tensor([i for i, group in enumerate(groups) for _ in group.samples]),
        lengths=torch.tensor(list(map(len, prompts))) + responses,
        response_tokens=responses,
        trained=has_reward,
        has_reward=None if has_reward.all() else has_reward,
        rewards=torch.tensor([scored.reward for scored in rows], dtype=torch.float32),
        named_rewards=named,
        reward_weights=weights,
        baseline_rewards=_baseline_rewards(greedy),
        truncated=torch.tensor([sample.truncated for sample in samples]),
    )


def rollout_metrics(groups: Sequence[Group], *, current_version: int) -> Metrics:
    """Return metrics on the rewards, lengths and staleness of the groups that are trained on.

    Args:
        groups: groups of the step, at least one.
        current_version: version of the trainer's weights. The staleness of a token is this version
            minus the version that generated the token.
    """
    rows = [scored for group in groups for scored in group.samples]
    samples = [scored.sample for scored in rows]
    response_tokens = [sample.num_response_tokens for sample in samples]
    lags = Counter[int]()
    for sample in samples:
        for version, count in sample.completion.versions.runs:
            lags[current_version - version] += count
    metrics: dict[str, Metric] = {
        "response_tokens/mean": _mean(response_tokens),
        "response_tokens/max": Max(max(response_tokens)),
        "prompt_tokens/mean": _mean(len(sample.prompt.tokens) for sample in samples),
        "truncated_fraction": _mean(sample.truncated for sample in samples),
        "samples/left_out": Sum(sum(not scored.has_reward for scored in rows)),
        "groups/equal_rewards_fraction": _mean(group.equal_rewards for group in groups),
        "staleness/mean": Mean(float(sum(lag * n for lag, n in lags.items())), lags.total()),
        "staleness/max": Max(max(lags, default=0)),
    }
    return reward_metrics(rows) | metrics


def reward_metrics(rows: Sequence[ScoredSample]) -> Metrics:
    """Return the metrics of the rewards of `rows`.

    Keys: `reward/mean` and `reward/std`, the total reward over all samples (the variance divides by
    n); `reward/<name>/mean`, one reward before its weight; `reward/<name>/<part>`, one part of a
    reward; `reward/tag/<tag>/mean`, the total reward of one tag, if there are several tags. A
    sample without a total reward counts only for the rewards that gave it a score. A key is missing
    if no sample counts for it.
    """
    totals = [scored.reward for scored in rows if scored.has_reward]
    named: dict[str, list[float]] = defaultdict(list)
    by_tag: dict[str, list[float]] = defaultdict(list)
    for scored in rows:
        if scored.has_reward:
            by_tag[scored.sample.tag].append(scored.reward)
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
    return Metrics(
        {
            **{name: _mean(values) for name, values in named.items()},
            "reward/mean": _mean(totals),
            "reward/std": Last(math.sqrt(variance)),
        }
    )


def _named_rewards(
    rows: Sequence[ScoredSample], weights: Mapping[str, float]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scores and the weights of the named rewards, both float32 `[B, R]`.

    A reward that gave no score to a sample has score 0 and weight 0 there. Without `weights` both
    results are None.
    """
    if not weights:
        return None, None
    scores = [[row.by_name.get(name, 0.0) for name in weights] for row in rows]
    shares = [[w if name in row.by_name else 0.0 for name, w in weights.items()] for row in rows]
    return torch.tensor(scores, dtype=torch.float32), torch.tensor(shares, dtype=torch.float32)


def _baseline_rewards(rows: Sequence[ScoredSample | None]) -> Tensor | None:
    """Return the rewards of the greedy baselines; None if no sample has one, ValueError if only
    some have."""
    scored = [row.reward for row in rows if row is not None]
    if not scored:
        return None
    if len(scored) < len(rows):
        raise ValueError(
            f"{len(rows) - len(scored)} of {len(rows)} samples have no greedy baseline"
        )
    return torch.tensor(scored, dtype=torch.float32)


def _mean(values: Iterable[float]) -> Mean:
    numbers = list(values)
    return Mean(math.fsum(numbers), len(numbers))
