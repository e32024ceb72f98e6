"""Rows of samples that have several: what an episode wrote in further conversations."""

from __future__ import annotations

from dataclasses import replace

import torch

from roll.core.completion import VersionRuns
from roll.core.sample_table import SampleTable


def with_rows_of_branches(table: SampleTable, multiple: int) -> SampleTable:
    """Return a table in which each branch of a sample is a row of its own, behind the other rows.

    A branch has what its sample has: reward, advantage, weight, whether it is trained. Rows that
    are not trained fill the table up, so that updates and ranks can divide it. A table without
    branches is returned as it is.

    Args:
        table: samples, after their advantages were computed.
        multiple: number that must divide the number of rows.
    """
    if table.branches is None:
        return table
    pairs = [(row, one) for row, own in enumerate(table.branches) for one in own]
    size = len(table) + len(pairs)
    spare = [0] * (-size % multiple)
    whole = replace(table, branches=None).select(
        [*range(len(table)), *(row for row, _ in pairs), *spare]
    )
    prompts, contents = list(whole.prompts), list(whole.contents)
    versions = list(whole.versions or [_all_sampled(n) for n in whole.response_tokens.tolist()])
    for row, (_, branch) in enumerate(pairs, start=len(table)):
        prompts[row], contents[row] = branch.prompt, branch.content
        versions[row] = branch.versions
    responses = torch.tensor([len(runs) for runs in versions])
    trained = whole.trained.clone()
    trained[size:] = False
    return replace(
        whole,
        prompts=prompts,
        contents=contents,
        versions=versions,
        turns=None,
        steps=None,
        lengths=torch.tensor([len(prompt) for prompt in prompts]) + responses,
        response_tokens=responses,
        trained=trained,
    )


def _all_sampled(count: int) -> VersionRuns:
    """Return runs that say that the policy wrote all tokens; which weights, nobody reads."""
    return VersionRuns(((0, count),) if count else ())
