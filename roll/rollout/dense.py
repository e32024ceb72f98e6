"""Conversion of a table of samples into a batch with their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.core.batches import PairedRollouts, RolloutBatch
from roll.core.completion import NOBODY, Written
from roll.core.sample_table import PairedSamples, SampleTable
from roll.core.types import Turn
from roll.distributed.remote_contents import FETCH_TIMEOUT_S, contents_here
from roll.distributed.remote_values import RemoteValue, fetch


def dense(table: SampleTable) -> RolloutBatch:
    """Return the rows of the table with their tokens, which are fetched if they are elsewhere.

    A row holds the prompt, then the response, then padding. Of a row that is `trained`, the
    response tokens that the policy wrote are trained. What the table has for each sample, such as
    the advantage, all trained tokens of the sample get. The rows of pairs stay pairs.

    Raises:
        WaitTimeoutError: tokens did not arrive in time.
        WorkerError: tokens are lost.
    """
    contents = contents_here(table.contents)
    shape = len(table), int(table.lengths.max())
    positions_1T = torch.arange(shape[1])[None]
    in_row_BT = positions_1T < table.lengths[:, None]
    responses_B1 = table.response_tokens[:, None]
    in_response_BT = (positions_1T >= table.lengths[:, None] - responses_B1) & in_row_BT
    written = [each.tokens for each in contents]
    rows = [part for pair in zip(table.prompts, written, strict=True) for part in pair]
    counts = torch.tensor([len(part) for part in rows]).view(-1, 2)
    if not torch.equal(counts.sum(1), table.lengths) or counts[:, 1:].ne(responses_B1).any():
        raise ValueError("samples have more or fewer tokens than their table says")
    mask_BT = in_response_BT & table.trained[:, None]
    for row, runs in enumerate(table.versions or ()):
        start = len(table.prompts[row])
        for version, count in runs.runs:
            if version == NOBODY:
                mask_BT[row, start : start + count] = False
            start += count
    step_rewards_BT, step_ends_BT = _steps(table, shape)
    made = PairedRollouts if isinstance(table, PairedSamples) else RolloutBatch
    return made(
        tokens=_filled(in_row_BT, rows, torch.int32).long(),
        lengths=table.lengths,
        loss_mask=mask_BT,
        token_weights=_spread(table.token_weights, mask_BT),
        sample_ids=table.sample_ids,
        tags=table.tags,
        group_ids=table.group_ids,
        rewards=table.rewards,
        turn_rewards=table.turn_rewards,
        has_reward=table.has_reward,
        named_rewards=table.named_rewards,
        reward_weights=table.reward_weights,
        baseline_rewards=table.baseline_rewards,
        token_rewards=step_rewards_BT,
        step_rewards=step_rewards_BT,
        step_ends=step_ends_BT,
        sample_weights=table.sample_weights,
        truncated=table.truncated,
        row_tokens=table.row_tokens,
        turns=_turns(table),
        temperatures=table.temperatures,
        pictures=table.pictures,
        rollout_logprobs=_engine_logprobs(in_response_BT, contents),
        old_logprobs=_column(table.old_logprobs, shape, "old log-probs"),
        ref_logprobs=_column(table.ref_logprobs, shape, "log-probs of the reference"),
        advantages=_spread(table.advantages, mask_BT),
    )


def _steps(table: SampleTable, shape: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """Return the process rewards, float32, and the tokens that have one, bool, both `[B, T]`; None
    if no sample has any."""
    if table.steps is None:
        return None, None
    rewards_BT, ends_BT = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for row, (prompt, steps) in enumerate(zip(table.prompts, table.steps, strict=True)):
        if steps is not None and len(steps):
            at_N = torch.tensor(steps.ends) + (len(prompt) - 1)
            rewards_BT[row, at_N] = torch.tensor(steps.values)
            ends_BT[row, at_N] = True
    return rewards_BT, ends_BT


def _turns(table: SampleTable) -> list[tuple[Turn, ...]] | None:
    """Return the turns of each row, with `begin` and `end` counted from the first token of its
    prompt; None if no sample has turns."""
    if table.turns is None:
        return None
    return [
        tuple(
            replace(turn, begin=turn.begin + len(prompt), end=turn.end + len(prompt))
            for turn in turns
        )
        for prompt, turns in zip(table.prompts, table.turns, strict=True)
    ]


def _engine_logprobs(where_BT: Tensor, contents: Sequence[Written]) -> Tensor | None:
    """Return the engine's log-probs at `where_BT`, the tokens of the responses; None if a response
    is none of the engine's."""
    if any(len(each.logprobs) < len(each.tokens) for each in contents):
        return None
    return _filled(where_BT, [each.logprobs for each in contents], torch.float32)


def _spread(values_B: Tensor | None, mask_BT: Tensor) -> Tensor | None:
    """Return the value of each row at all of its positions in the mask, and 0 elsewhere; None
    without values."""
    return None if values_B is None else values_B[:, None] * mask_BT


def _column(
    rows: Sequence[RemoteValue[Any]] | None, shape: tuple[int, int], what: str
) -> Tensor | None:
    """Return the rows, each a float32 array, as `[B, T]` with zeros behind them; None without rows.

    Args:
        shape: B and T.
        what: name of the values, for the message if they do not arrive in time or are lost.
    """
    if rows is None:
        return None
    values_BT = np.zeros(shape, dtype=np.float32)
    # Not by torch.from_numpy: what Ray has fetched is read-only, and PyTorch warns of such arrays.
    for row, values in enumerate(fetch(rows, timeout_s=FETCH_TIMEOUT_S, what=what)):
        values_BT[row, : len(values)] = values
    return torch.from_numpy(values_BT)


def _filled(where_BT: Tensor, parts: Sequence[array[Any]], dtype: torch.dtype) -> Tensor:
    """Return `[B, T]` with the values of the arrays, one array after the other, at the positions
    that are `where_BT`, and 0 elsewhere. The items of the arrays have the type `dtype`.

    All arrays are copied at once: one copy for each would take most of the time of short samples.
    """
    values = bytearray().join(parts)
    found_BT = torch.zeros(where_BT.shape, dtype=dtype)
    if values:  # `frombuffer` refuses an empty buffer
        found_BT.masked_scatter_(where_BT, torch.frombuffer(values, dtype=dtype))
    return found_BT
