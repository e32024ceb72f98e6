"""Rows of samples that have several: what an episode wrote in further contexts.

Ranks score and train rows, but advantages belong to episodes. So a step makes rows of its samples,
and where an algorithm computes with single tokens, joins the rows of each episode again for it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from roll.core.batches import RolloutBatch
from roll.core.completion import VersionRuns
from roll.core.sample_table import SampleTable
from roll.core.types import Turn


def with_rows_of_branches(table: SampleTable, multiple: int) -> SampleTable:
    """Return a table in which each branch of a sample is a row of its own, behind those of its
    sample before it.

    A branch has what its sample has: reward, advantage, weight, whether it is trained. Rows that
    are not trained fill the table up, so that updates and ranks can divide it. A table without
    branches is returned as it is.

    Args:
        table: samples.
        multiple: number that must divide the number of rows.
    """
    if table.branches is None:
        return table
    pairs = [(i, row) for i, own in enumerate(table.branches) for row in (None, *own)]
    spare = [0] * (-len(pairs) % multiple)
    whole = replace(table, branches=None, turns=None, steps=None).select(
        [*(i for i, _ in pairs), *spare]
    )
    prompts, contents = list(whole.prompts), list(whole.contents)
    pictures = list(whole.pictures or [None] * len(whole))
    versions = list(whole.versions or [_all_sampled(n) for n in whole.response_tokens.tolist()])
    for row, (_, branch) in enumerate(pairs):
        if branch is not None:
            prompts[row], contents[row] = branch.prompt, branch.content
            versions[row], pictures[row] = branch.versions, branch.pictures
    responses = torch.tensor([len(runs) for runs in versions])
    trained = whole.trained.clone()
    trained[len(pairs) :] = False
    return replace(
        whole,
        prompts=prompts,
        contents=contents,
        pictures=pictures if any(pictures) else None,
        versions=versions,
        lengths=torch.tensor([len(prompt) for prompt in prompts]) + responses,
        response_tokens=responses,
        trained=trained,
    )


@dataclass(frozen=True)
class JoinedRows:
    """Place of each token of the samples of a step among their rows.

    Joined, a sample holds the prompt of its first row, then its turns in the order in which they
    were written, each behind what was said before it in its row. The prompts of its further rows
    are left out: nothing in them is trained, and they repeat what is there already.
    """

    rows_BT: Tensor
    """Row of each token, int64; 0 in the padding."""
    places_BT: Tensor
    """Place of each token in its row, int64; 0 in the padding."""
    lengths_B: Tensor
    """Number of tokens of each sample, int64."""
    firsts_B: Tensor
    """First row of each sample, int64."""
    owners_R: Tensor
    """Sample of each row, int64; 0 of rows that only fill up."""
    turns: list[tuple[Turn, ...]]
    """Turns of each sample, with places among all of its tokens."""
    steps: tuple[Tensor, Tensor] | None
    """Rewards of steps, float32, and the tokens that have one, bool, both `[B, T]`; None if no
    sample has any."""

    @classmethod
    def of(cls, table: SampleTable, rows: SampleTable) -> Self:
        """Find the places.

        Args:
            table: samples with turns and branches.
            rows: their rows, from `with_rows_of_branches`.
        """
        assert table.branches is not None
        sizes = [1 + len(own) for own in table.branches]
        firsts = [0, *accumulate(sizes)]
        prompts = [len(prompt) for prompt in rows.prompts]
        responses = rows.response_tokens.tolist()
        found = [
            _pieces(own, first, prompts[first : first + size], responses[first : first + size])
            for own, first, size in zip(
                table.turns or [()] * len(table), firsts[:-1], sizes, strict=True
            )
        ]
        lengths = [sum(end - begin for _, begin, end in pieces) for pieces, _ in found]
        shape = len(table), max(lengths)
        rows_BT, places_BT = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        for i, (pieces, _) in enumerate(found):
            rows_BT[i, : lengths[i]] = torch.cat(
                [torch.full((end - begin,), row) for row, begin, end in pieces]
            )
            places_BT[i, : lengths[i]] = torch.cat(
                [torch.arange(begin, end) for _, begin, end in pieces]
            )
        owners = [i for i, size in enumerate(sizes) for _ in range(size)]
        made = cls(
            rows_BT=rows_BT,
            places_BT=places_BT,
            lengths_B=torch.tensor(lengths),
            firsts_B=torch.tensor(firsts[:-1]),
            owners_R=torch.tensor([*owners, *[0] * (len(rows) - len(owners))]),
            turns=[turns for _, turns in found],
            steps=None,
        )
        return made if table.steps is None else replace(made, steps=made._steps(table, rows))

    def join(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the samples as one row each, with their turns and the rewards of their steps.

        Args:
            batch: the rows, with their tokens.
        """
        inside_BT = self._inside_BT
        columns: dict[str, Any] = {"teacher_outputs": None}  # of rows, which learn from them
        for spec in fields(batch):
            value = getattr(batch, spec.name)
            if value is not None and "T" in spec.metadata.get("axes", ""):
                taken_BT = value[self.rows_BT, self.places_BT]
                columns[spec.name] = taken_BT.masked_fill(~inside_BT, 0)
        if self.steps is not None:
            rewards_BT, ends_BT = self.steps
            columns |= {"token_rewards": rewards_BT, "step_rewards": rewards_BT}
            columns["step_ends"] = ends_BT
        return replace(
            batch.select(self.firsts_B), lengths=self.lengths_B, turns=self.turns, **columns
        )

    def part(self, samples: RolloutBatch, batch: RolloutBatch) -> RolloutBatch:
        """Return the rows of `batch` with what `Shaping.add_advantages` has given to their
        samples."""
        columns: dict[str, Any] = {}
        for name in ("loss_mask", "advantages", "returns", "token_rewards"):
            value_BT = getattr(samples, name)
            if value_BT is not None:
                columns[name] = self._spread(value_BT, batch)
        for name in ("rewards", "baseline_rewards", "sample_weights"):
            value_B = getattr(samples, name)
            columns[name] = None if value_B is None else value_B[self.owners_R]
        return replace(batch, **columns)

    @property
    def _inside_BT(self) -> Tensor:
        """True where a sample has a token."""
        return torch.arange(self.rows_BT.shape[1])[None] < self.lengths_B[:, None]

    def _spread(self, values_BT: Tensor, batch: RolloutBatch) -> Tensor:
        """Return the values of tokens of samples at their places in the rows, and 0 elsewhere."""
        inside_BT = self._inside_BT
        found_RT = torch.zeros(batch.tokens.shape, dtype=values_BT.dtype)
        found_RT[self.rows_BT[inside_BT], self.places_BT[inside_BT]] = values_BT[inside_BT]
        return found_RT

    def _steps(self, table: SampleTable, rows: SampleTable) -> tuple[Tensor, Tensor]:
        """Return the rewards of steps and the tokens that have one. Their places count the tokens
        of all responses of a sample, one row after the other."""
        assert table.steps is not None
        assert table.branches is not None
        inside_BT = self._inside_BT
        where_RT = torch.zeros(len(rows), int(rows.lengths.max()), dtype=torch.int64)
        where_RT[self.rows_BT[inside_BT], self.places_BT[inside_BT]] = inside_BT.nonzero()[:, 1]
        rewards_BT = torch.zeros(self.rows_BT.shape)
        ends_BT = torch.zeros(self.rows_BT.shape, dtype=torch.bool)
        firsts = self.firsts_B.tolist()
        for i, (steps, branches) in enumerate(zip(table.steps, table.branches, strict=True)):
            if steps is None or not len(steps):
                continue
            own = range(firsts[i], firsts[i] + 1 + len(branches))
            at_T = torch.cat([_in_response(where_RT[row], rows, row) for row in own])
            if not len(at_T):  # the policy wrote nothing
                continue
            at_N = at_T[(torch.tensor(steps.ends) - 1).clamp(min=0)]
            rewards_BT[i, at_N] = torch.tensor(steps.values)
            ends_BT[i, at_N] = True
        return rewards_BT, ends_BT


def _in_response(where_T: Tensor, rows: SampleTable, row: int) -> Tensor:
    """Return the values of `where_T` at the response of a row."""
    start = len(rows.prompts[row])
    return where_T[start : start + int(rows.response_tokens[row])]


def _pieces(
    turns: tuple[Turn, ...], first: int, prompts: list[int], responses: list[int]
) -> tuple[list[tuple[int, int, int]], tuple[Turn, ...]]:
    """Return the pieces of rows that make up a sample, each with its row, begin and end there; and
    the turns of the sample, with places among all of these tokens.

    Args:
        turns: turns of the sample, in the order in which they were written.
        first: first row of the sample.
        prompts: number of tokens of the prompt of each of its rows.
        responses: number of tokens of the response of each of its rows.
    """
    pieces, placed, done = [(first, 0, prompts[0])], list[Turn](), [0] * len(prompts)
    size = prompts[0]
    for turn in turns:
        row, start = turn.row, prompts[turn.row]
        begin, done[row] = done[row], turn.end
        offset = size - begin
        pieces.append((first + row, start + begin, start + turn.end))
        placed.append(replace(turn, begin=offset + turn.begin, end=offset + turn.end, row=0))
        size += turn.end - begin
    for row, (start, behind) in enumerate(zip(prompts, responses, strict=True)):
        pieces.append((first + row, start + done[row], start + behind))  # behind the last turn
    return pieces, tuple(placed)


def _all_sampled(count: int) -> VersionRuns:
    """Return runs that say that the policy wrote all tokens; which weights, nobody reads."""
    return VersionRuns(((0, count),) if count else ())
