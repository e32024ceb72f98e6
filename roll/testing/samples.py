"""Samples for the checks of parts: made up, of different lengths, with two tags."""

from __future__ import annotations

from array import array
from dataclasses import replace

import torch
from torch import Tensor

from roll.core.batches import RolloutBatch
from roll.core.completion import TOKEN_TYPE, Completion, FinishReason
from roll.core.sample_table import SampleTable
from roll.rollout.dense import dense


def table(prompts: int = 3, per_prompt: int = 4, *, seed: int = 0) -> SampleTable:
    """Return samples as a driver has them, with rewards from 0 to 1 and no tokens on the driver's
    side that an estimator could read."""
    g = torch.Generator().manual_seed(seed)
    rows = prompts * per_prompt
    lengths = torch.randint(2, 9, (rows,), generator=g)
    before = [
        array(TOKEN_TYPE, torch.randint(4, 90, (3 + i,), generator=g).tolist())
        for i in range(prompts)
    ]
    written = [
        Completion.of(
            torch.randint(4, 90, (int(n),), generator=g).tolist(),
            (-torch.rand(int(n), generator=g)).tolist(),
            [0] * int(n),
            FinishReason.STOP,
        )
        for n in lengths
    ]
    rewards = torch.rand(rows, generator=g)
    return SampleTable(
        sample_ids=[f"0/check:{i // per_prompt}/{i % per_prompt}" for i in range(rows)],
        tags=[("even", "odd")[i // per_prompt % 2] for i in range(rows)],
        prompts=[before[i // per_prompt] for i in range(rows)],
        contents=[one.content for one in written],
        group_ids=torch.arange(rows) // per_prompt,
        lengths=lengths + torch.tensor([len(before[i // per_prompt]) for i in range(rows)]),
        response_tokens=lengths,
        trained=torch.ones(rows, dtype=torch.bool),
        rewards=rewards,
        named_rewards=rewards[:, None],
        reward_weights=torch.ones(rows, 1),
        baseline_rewards=torch.full((rows,), 0.5),
        truncated=torch.arange(rows) % 5 == 0,
    )


def batch(samples: SampleTable, *, seed: int = 1) -> RolloutBatch:
    """Return the samples with tokens, and with columns as models beside the policy leave
    them."""
    found = dense(samples)
    g = torch.Generator().manual_seed(seed)

    def column(low: float, high: float) -> Tensor:
        drawn_BT = low + (high - low) * torch.rand(found.loss_mask.shape, generator=g)
        return drawn_BT * found.loss_mask

    old_BT = column(-4.0, -0.1)
    return replace(
        found,
        old_logprobs=old_BT,
        squared_probs=column(0.1, 0.9),
        ref_logprobs=old_BT + column(-0.3, 0.3),
        teacher_logprobs=old_BT + column(-0.5, 0.5),
        values=column(-1.0, 1.0),
        implicit_rewards=column(-0.1, 0.1),
    )
