"""Conversion of a table of samples into a batch with their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roll.core.batches import RolloutBatch
from roll.core.sample_table import SampleTable
from roll.distributed.remote_contents import FETCH_TIMEOUT_S, contents_here
from roll.distributed.remote_values import RemoteValue, fetch


def dense(table: SampleTable) -> RolloutBatch:
    """Return the rows of the table with their tokens, which are fetched if they are elsewhere.

    A row holds the prompt, then the response, then padding. All response tokens of a row that is
    `trained` are trained. What the table has for each sample, such as the advantage, all trained
    tokens of the sample get.

    Raises:
        WaitTimeoutError: tokens did not arrive in time.
        WorkerError: tokens are lost.
    """
    contents = contents_here(table.contents)
    lengths, responses = table.lengths.tolist(), table.response_tokens.tolist()
    shape = len(table), max(lengths)
    tokens_BT = torch.zeros(shape, dtype=torch.int64)
    logprobs_BT = torch.zeros(shape, dtype=torch.float32)
    for row, (prompt, written, count) in enumerate(
        zip(table.prompts, contents, responses, strict=True)
    ):
        start, end = len(prompt), len(prompt) + count
        _fill(tokens_BT[row, :start], prompt, torch.int32)
        _fill(tokens_BT[row, start:end], written.tokens, torch.int32)
        _fill(logprobs_BT[row, start:end], written.logprobs, torch.float32)
    positions_1T = torch.arange(shape[1])[None]
    starts_B1 = (table.lengths - table.response_tokens)[:, None]
    in_response_BT = (positions_1T >= starts_B1) & (positions_1T < table.lengths[:, None])
    mask_BT = in_response_BT & table.trained[:, None]
    return RolloutBatch(
        tokens=tokens_BT,
        lengths=table.lengths,
        loss_mask=mask_BT,
        token_weights=_spread(table.token_weights, mask_BT),
        sample_ids=table.sample_ids,
        tags=table.tags,
        group_ids=table.group_ids,
        rewards=table.rewards,
        has_reward=table.has_reward,
        named_rewards=table.named_rewards,
        reward_weights=table.reward_weights,
        baseline_rewards=table.baseline_rewards,
        sample_weights=table.sample_weights,
        truncated=table.truncated,
        rollout_logprobs=logprobs_BT,
        old_logprobs=_column(table.old_logprobs, shape, "old log-probs"),
        ref_logprobs=_column(table.ref_logprobs, shape, "log-probs of the reference"),
        advantages=_spread(table.advantages, mask_BT),
    )


def _spread(values_B: Tensor | None, mask_BT: Tensor) -> Tensor | None:
    """Return the value of each row at all of its positions in the mask, and 0 elsewhere."""
    return None if values_B is None else values_B[:, None] * mask_BT


def _column(
    rows: Sequence[RemoteValue[Any]] | None, shape: tuple[int, int], what: str
) -> Tensor | None:
    """Return the rows, each a float32 array, as `[B, T]` with zeros behind them."""
    if rows is None:
        return None
    values_BT = torch.zeros(shape, dtype=torch.float32)
    for row, values in enumerate(fetch(rows, timeout_s=FETCH_TIMEOUT_S, what=what)):
        values_BT[row, : len(values)] = torch.from_numpy(values)
    return values_BT


def _fill(row_N: Tensor, values: array[int] | array[float], dtype: torch.dtype) -> None:
    """Copy the values of an array, whose items have the type `dtype`, into a row of its length."""
    if len(values):  # `frombuffer` refuses an empty buffer
        row_N.copy_(torch.frombuffer(values, dtype=dtype))
