"""The batches of this framework; one class per kind of training sample.

All `BT` tensors are aligned to `tokens`: position t describes token t. The shift by one between
logits and tokens happens once, in `algorithms/logprobs.py`, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from roll.core.batch import Batch, tensor


@dataclass(frozen=True, kw_only=True)
class TokenBatch(Batch):
    """What every forward pass needs: right-padded tokens and their number per row."""

    tokens: Tensor = tensor("BT", required=True)
    """Int64; positions at or after `lengths` hold padding of any value."""
    lengths: Tensor = tensor("B", required=True)
    """Int64; real tokens of each row."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch(TokenBatch):
    """What every update needs: which tokens it is about, and what each counts."""

    loss_mask: Tensor = tensor("BT", required=True)
    """Bool; True where a token is trained."""
    token_weights: Tensor | None = tensor("BT")
    """Float32; what turns a sum over all ranks and micro-batches into the configured mean."""
    teacher_outputs: list[Any] | None = None
    """What the teacher of each row says of its trained tokens: a `TeacherRow` where it is learned
    from, a `RemoteValue` of one on the way there."""


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(TrainBatch):
    """Pairs of responses: each row at an even place is chosen, the one behind it rejected."""

    unit: ClassVar[int] = 2
    margins: Tensor | None = tensor("B")
    """Float32; how much better the chosen response is, the same in both rows."""
    ref_sums: Tensor | None = tensor("B")
    """Float32; log-prob of the trained tokens by the frozen reference model."""


@dataclass(frozen=True, kw_only=True)
class LabelledBatch(TrainBatch):
    """Single responses, wanted or not."""

    desirable: Tensor = tensor("B", required=True)
    """Bool."""
    ref_sums: Tensor | None = tensor("B")
    """Float32; log-prob of the trained tokens by the frozen reference model."""
    divergence: Tensor | None = tensor("B")
    """Float32; of policy and reference, estimated on the whole update; the same in all rows."""


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(TrainBatch):
    """Generated samples on their way through reward, scoring, advantage and training. What the
    policy wrote is trained.

    Frozen: a step returns `dataclasses.replace(batch, advantages=...)`, so what each step adds is
    visible at its call.

    Example: two siblings of one prompt with tokens [2, 2] of prompt and [3, 1] of response:
        tokens [[5, 6, 7, 8, 1], [5, 6, 1, 0, 0]], lengths [5, 3],
        loss_mask [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]], group_ids [0, 0]
    """

    sample_ids: list[str]
    """`<group>/<sibling>`."""
    tags: list[str]
    """Where each prompt came from; routes rewards and groups metrics."""
    group_ids: Tensor = tensor("B", required=True)
    """Int64; siblings of one prompt share an id."""
    rewards: Tensor | None = tensor("B")
    """Float32; the total reward of each sample."""
    has_reward: Tensor | None = tensor("B")
    """Bool; False where a reward failed. Such a row has no trained tokens, and no statistic may see
    its reward. Left out where all have one."""
    named_rewards: Tensor | None = tensor("BR")
    """Float32; the score of each reward before its weight, in the order of the config; 0 where the
    sample's tag is not one of the reward's."""
    reward_weights: Tensor | None = tensor("BR")
    """Float32; the weight of each of `named_rewards`, 0 where the sample's tag is not one of the
    reward's. Their products add up to `rewards`, as long as nothing shapes it."""
    baseline_rewards: Tensor | None = tensor("B")
    """Float32; the total reward of a greedy response to the same prompt."""
    token_rewards: Tensor | None = tensor("BT")
    """Float32; paid per token, on top of `rewards`: a KL penalty, the reward of a step."""
    sample_weights: Tensor | None = tensor("B")
    """Float32, above zero; how much the sample counts in the loss, compared with the others."""
    truncated: Tensor | None = tensor("B")
    """Bool; the response hit the length limit."""
    rollout_logprobs: Tensor | None = tensor("BT")
    """Float32; as reported by the engine, zero outside `loss_mask`."""
    versions: Tensor | None = tensor("BT", pad=-1)
    """Int64; version of the weights that produced each token, -1 outside `loss_mask`."""
    old_logprobs: Tensor | None = tensor("BT")
    """Float32; the trainer's own, before the first update of the step."""
    ref_logprobs: Tensor | None = tensor("BT")
    """Float32; the frozen reference model's."""
    teacher_logprobs: Tensor | None = tensor("BT")
    """Float32; those of the teacher that the sample's tag names."""
    values: Tensor | None = tensor("BT")
    """Float32; the critic's."""
    advantages: Tensor | None = tensor("BT")
    """Float32; zero outside `loss_mask`."""
    returns: Tensor | None = tensor("BT")
    """Float32; what the critic is trained towards, zero outside `loss_mask`."""
    importance_weights: Tensor | None = tensor("BT")
    """Float32; trainer over engine, what corrects the policy loss for the engine's own log-probs;
    zero outside `loss_mask`."""
    chosen_tokens: Tensor | None = tensor("BT")
    """Bool; tokens that a loss term treats in its own way, chosen from the whole update."""
