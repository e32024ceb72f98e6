"""Pairs of a step: the best and the worst sample of each prompt, or an answer and a sample."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

import torch

from roll.algorithms.advantages.rewards import total_rewards
from roll.algorithms.siblings import Siblings
from roll.core.batches import PairedRollouts, RolloutBatch
from roll.core.completion import LOGPROB_TYPE, VersionRuns, Written
from roll.core.sample_table import PairedSamples, SampleTable

S = TypeVar("S", RolloutBatch, SampleTable)


def paired(samples: S) -> S:
    """Return two rows for each group, in the order of the group ids: its trained sample with the
    highest total reward, and the one with the lowest; of equal ones the first.

    A group whose trained samples have equal rewards, or that has fewer than two of them, gives two
    rows that are not trained, so that every step has as many rows.

    Args:
        samples: all samples of a step, with rewards, each in one row.

    Returns:
        `PairedRollouts` or `PairedSamples`, whose pairs stay together wherever they are split.

    Raises:
        ValueError: rewards are missing, or a group has a single sample.
    """
    rewards, able = total_rewards(samples).tolist(), (samples.trained_tokens() > 0).tolist()
    rows: list[int] = []
    kept: list[bool] = []
    for group in Siblings.of(samples.group_ids).rows():
        best, worst, apart = _ends(group.tolist(), rewards, able)
        rows += [best, worst]
        kept += [apart, apart]
    chosen = samples.select(rows).keep(torch.tensor(kept))
    columns = {spec.name: getattr(chosen, spec.name) for spec in fields(chosen)}
    kind = PairedRollouts if isinstance(chosen, RolloutBatch) else PairedSamples
    return cast(S, kind(**columns))


def paired_with_answers(samples: SampleTable) -> PairedSamples:
    """Return two rows for each sample: the answer to its prompt, and the sample.

    Both are trained unless the sample is not.

    Raises:
        ValueError: the table has no answers.
    """
    if samples.answers is None:
        raise ValueError("the samples have no answers; run with_answers first")
    sizes = torch.tensor([len(answer) for answer in samples.answers])
    prompts_B = samples.lengths - samples.response_tokens
    rows = samples.select([i for i in range(len(samples)) for _ in range(2)])
    columns: dict[str, Any] = {spec.name: getattr(rows, spec.name) for spec in fields(rows)}
    names = list(rows.sample_ids)
    names[::2] = [f"{name}/answer" for name in samples.sample_ids]
    contents, versions = list(rows.contents), rows.versions
    contents[::2] = [Written(answer, array(LOGPROB_TYPE)) for answer in samples.answers]
    if versions is not None:
        versions = list(versions)
        versions[::2] = [VersionRuns(((0, len(answer)),)) for answer in samples.answers]
    lengths_B, responses_B = rows.lengths.clone(), rows.response_tokens.clone()
    lengths_B[::2], responses_B[::2] = prompts_B + sizes, sizes
    return PairedSamples(
        **columns
        | {
            "sample_ids": names,
            "contents": contents,
            "versions": versions,
            "answers": None,
            "truncated": None,
        }
        | {"lengths": lengths_B, "response_tokens": responses_B}
    )


def _ends(
    group: Sequence[int], rewards: Sequence[float], able: Sequence[bool]
) -> tuple[int, int, bool]:
    """Return the best and the worst row of a group, and whether their rewards differ; without two
    trained rows whose rewards differ, the first two rows and False."""
    if len(group) < 2:
        raise ValueError(f"row {group[0]} is alone in its group; a pair needs two samples")
    trained = [row for row in group if able[row]]
    if trained:
        best = max(trained, key=lambda row: rewards[row])
        worst = min(trained, key=lambda row: rewards[row])
        if rewards[best] > rewards[worst]:
            return best, worst, True
    return group[0], group[1], False
