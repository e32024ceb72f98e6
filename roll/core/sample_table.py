"""`SampleTable`: the samples of a step as the driver has them, without a single token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from roll.core.batch import Batch, tensor
from roll.core.completion import Content, VersionRuns
from roll.core.pictures import Pictures
from roll.core.step_rewards import StepRewards
from roll.core.types import Turn


@dataclass(frozen=True, slots=True)
class Branch:
    """Further row of an episode, whose context does not continue the others: of a sub-agent, after
    a summary, or where the chat template has rewritten earlier turns."""

    prompt: Any
    """Token ids before the response, a sequence of int."""
    content: Content
    """Tokens of the response, or where they are."""
    versions: VersionRuns
    """Weight version of each token of the response."""
    pictures: Pictures | None = None
    """Pictures before the response; None without any."""


@dataclass(frozen=True, kw_only=True)
class SampleTable(Batch):
    """Generated samples on their way through reward, scoring, advantage and training: numbers of
    whole samples, and where their tokens are.

    The fields that `RolloutBatch` has too mean the same. `dense` (`roll/rollout/dense.py`) makes
    a `RolloutBatch` of it, which the ranks do with their own rows, and the driver only where an
    algorithm computes with single tokens of all samples.
    """

    sample_ids: list[str]
    """`<group>/<sibling>` of each sample."""
    tags: list[str]
    """Tag of each prompt."""
    prompts: list[Any]
    """Token ids of each prompt, a sequence of int; siblings share one object."""
    contents: list[Content]
    """Tokens of each response, or where they are."""
    pictures: list[Pictures | None] | None = None
    """Pictures of each sample; None if no sample has any."""
    versions: list[VersionRuns] | None = None
    """Weight version of each token of each response, as runs; tokens of `NOBODY` are not trained.
    None if the policy wrote all tokens of all responses."""
    turns: list[tuple[Turn, ...]] | None = None
    """Turns of the policy of each sample, in the order in which they were written, in all of its
    rows; None if no sample is an episode."""
    branches: list[tuple[Branch, ...]] | None = None
    """Further rows of each sample, which are trained as it is; None if there are none."""
    answers: list[array[int]] | None = None
    """Tokens of the data set's answer to each sample's prompt, int32; None unless the algorithm
    trains on them."""
    group_ids: Tensor = tensor("B", required=True)
    """Id of each sample's group, int64 `[B]`; siblings of one prompt have the same id."""
    lengths: Tensor = tensor("B", required=True)
    """Number of tokens of prompt and response, int64 `[B]`."""
    response_tokens: Tensor = tensor("B", required=True)
    """Number of tokens of the response, int64 `[B]`."""
    row_tokens: Tensor | None = tensor("B")
    """Number of tokens of the longest row of each sample, int64 `[B]`; None if each has one row."""
    trained: Tensor = tensor("B", required=True)
    """False for a sample that loses its loss, all of it, bool `[B]`."""
    rewards: Tensor | None = tensor("B")
    """Total reward, float32 `[B]`."""
    turn_rewards: Tensor | None = tensor("B")
    """Part of `steps` that an environment gave for turns, float32 `[B]`; None without any."""
    has_reward: Tensor | None = tensor("B")
    """False where a reward failed, bool `[B]`; None where every sample has a reward."""
    steps: list[StepRewards | None] | None = None
    """Rewards of single steps of each response; None if no response has any."""
    named_rewards: Tensor | None = tensor("BR")
    """Score of each reward before its weight is applied, float32 `[B, R]`."""
    reward_weights: Tensor | None = tensor("BR")
    """Weight of each entry of `named_rewards`, float32 `[B, R]`."""
    baseline_rewards: Tensor | None = tensor("B")
    """Total reward of a greedy response to the same prompt, float32 `[B]`."""
    sample_weights: Tensor | None = tensor("B")
    """Weight of each sample in the loss, relative to other samples, float32 `[B]`, above zero; None
    if all count the same."""
    truncated: Tensor | None = tensor("B")
    """True where the response ended at the length limit, bool `[B]`."""
    temperatures: Tensor | None = tensor("B")
    """Temperature at which each sample was drawn, float32 `[B]`; None if it is that of the run for
    all."""
    advantages: Tensor | None = tensor("B")
    """Advantage of every trained token of the sample, float32 `[B]`."""
    token_weights: Tensor | None = tensor("B")
    """Factor of the loss of every trained token of the sample, float32 `[B]`."""
    ref_logprobs: list[Any] | None = None
    """`RemoteValue` of the log-probabilities of a row's tokens under the frozen reference model, a
    float32 array."""
    old_logprobs: list[Any] | None = None
    """`RemoteValue` of the log-probabilities of a row's tokens before the first update of the step,
    a float32 array."""

    token_rewards: ClassVar[None] = None
    """Rewards of single tokens need a `RolloutBatch`, which `dense` makes of the table."""

    def inputs(self) -> SampleTable:
        """Return what a forward pass reads, and which samples are trained; names are blank."""
        blank = [""] * len(self)
        return SampleTable(
            sample_ids=blank,
            tags=blank,
            prompts=self.prompts,
            contents=self.contents,
            pictures=self.pictures,
            versions=self.versions,
            group_ids=self.group_ids,
            lengths=self.lengths,
            response_tokens=self.response_tokens,
            trained=self.trained,
            temperatures=self.temperatures,
        )

    def trained_tokens(self) -> Tensor:
        """Return the number of trained tokens of each sample, in all of its rows, int64 `[B]`."""
        sampled_B = self.response_tokens
        if self.versions is not None:
            sampled_B = torch.tensor([runs.sampled for runs in self.versions])
        if self.branches is not None:
            sampled_B = sampled_B + torch.tensor(
                [sum(branch.versions.sampled for branch in own) for own in self.branches]
            )
        return sampled_B * self.trained

    def keep(self, kept_B: Tensor) -> Self:
        """Return the table with only those samples trained that are trained now and are `kept_B`,
        bool `[B]`."""
        return replace(self, trained=self.trained & kept_B)


@dataclass(frozen=True, kw_only=True)
class PairedSamples(SampleTable):
    """Pairs of samples, like the rows of `PairedRollouts`."""

    unit: ClassVar[int] = 2
