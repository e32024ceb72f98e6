"""The batches of this framework; one class per kind of training sample.

All tensors `[B, T]` are aligned to `tokens`: the value at position t describes token t. The shift
by one position between logits and tokens happens only in `algorithms/logprobs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.nn.functional import pad

from roll.core.batch import Batch, tensor
from roll.core.metrics import Metrics
from roll.core.pictures import Pictures
from roll.core.types import Turn


@dataclass(frozen=True, kw_only=True)
class TokenBatch(Batch):
    """Input of every forward pass: right-padded tokens and the number of real tokens per row."""

    row_lengths = "lengths"
    tokens: Tensor = tensor("BT", required=True)
    """Token ids, int64 `[B, T]`. Positions at or after `lengths` hold padding of any value."""
    lengths: Tensor = tensor("B", required=True)
    """Number of tokens of each row without padding, int64 `[B]`."""
    temperatures: Tensor | None = tensor("B")
    """Temperature at which the log-probs of each row are computed, float32 `[B]`; None: that of the
    model's head."""
    pictures: list[Pictures | None] | None = None
    """Pictures of each row; None if no row has any."""

    def inputs(self) -> TokenBatch:
        """Return what a forward pass reads, without all other fields."""
        return TokenBatch(
            tokens=self.tokens,
            lengths=self.lengths,
            temperatures=self.temperatures,
            pictures=self.pictures,
        )


@dataclass(frozen=True, kw_only=True)
class TokenColumn(Batch):
    """One number for each token of a batch: the result of a forward pass."""

    row_lengths = "lengths"
    lengths: Tensor = tensor("B", required=True)
    """Number of tokens of each row without padding, int64 `[B]`."""
    values: Tensor = tensor("BT", required=True)
    """Log-probability or value of each token, float32 `[B, T]`."""

    def aligned(self, batch: TokenBatch) -> Tensor:
        """Return `values` `[B, T]` with the width of `batch`, whose rows these are; positions that
        are missing at the end become 0."""
        return _widened(self.values, batch)


@dataclass(frozen=True, kw_only=True)
class PolicyColumns(TokenColumn):
    """Results of a policy's forward pass for each token of a batch; `values` are log-probs."""

    squares: Tensor | None = tensor("BT")
    """Sum of the squared probabilities of the distribution that each token was drawn from, float32
    `[B, T]`; None unless it was asked for."""

    def aligned_squares(self, batch: TokenBatch) -> Tensor | None:
        """Return `squares` as `aligned` returns `values`; None if there are none."""
        return None if self.squares is None else _widened(self.squares, batch)


@dataclass(frozen=True, kw_only=True)
class RowColumn(Batch):
    """One number for each row of a batch."""

    values: Tensor = tensor("B", required=True)
    """Number of each row, float32 `[B]`."""


@dataclass(frozen=True)
class ScoredSamples:
    """Result of a forward pass over samples: log-probs that stay in the object store."""

    logprobs: list[Any]
    """`RemoteValue` of a float32 array for each row: the log-probability of each of its tokens."""
    metrics: Metrics
    """Metrics of the log-probs."""

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join the rows and merge the metrics of all parts, in order."""
        return cls(
            [row for part in parts for row in part.logprobs],
            Metrics.concat([part.metrics for part in parts]),
        )


@dataclass(frozen=True, kw_only=True)
class TeacherColumn(Batch):
    """Output of a teacher for each row of a batch."""

    outputs: list[Any]
    """`RemoteValue` of a `TeacherRow` for each row."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch(TokenBatch):
    """Input of every update: which tokens are trained, and how much each counts in the loss."""

    loss_mask: Tensor = tensor("BT", required=True)
    """True where a token is trained, bool `[B, T]`."""
    token_weights: Tensor | None = tensor("BT")
    """Factor of each token's loss, float32 `[B, T]`. With these factors, the plain sum over all
    ranks and micro-batches is the configured mean."""
    teacher_outputs: list[Any] | None = None
    """Outputs of the teacher at the trained tokens, one item per row: a `RemoteValue` on the way to
    the student, a `TeacherRow` once the student has fetched the value."""

    def trained_inputs(self) -> Self:
        """Return the batch with only what a forward pass reads (without `temperatures`), and which
        tokens are trained."""
        unset: dict[str, Any] = {s.name: None for s in fields(self) if s.default is None}
        return replace(self, **(unset | {"pictures": self.pictures}))


@dataclass(frozen=True, kw_only=True)
class RetokenizedBatch(TrainBatch):
    """Texts of a student's rows in the tokens of a teacher. Trained are those tokens that begin at
    the same place of the text as a trained token of the student."""

    student_positions: list[Tensor]
    """Position in the student's row of the token that begins where each trained token does, int64,
    ascending; one tensor per row."""


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(TrainBatch):
    """Pairs of responses: rows 0, 2, 4, ... are the chosen ones, and the row after each of them is
    the rejected one."""

    unit: ClassVar[int] = 2
    margins: Tensor | None = tensor("B")
    """Margin by which the chosen response is better, float32 `[B]`; equal in both rows of a
    pair."""
    ref_sums: Tensor | None = tensor("B")
    """Sum of the log-probabilities of the row's trained tokens under the frozen reference model,
    float32 `[B]`."""


@dataclass(frozen=True, kw_only=True)
class LabelledBatch(TrainBatch):
    """Single responses, each labelled as desirable or not."""

    desirable: Tensor = tensor("B", required=True)
    """True for a desirable response, bool `[B]`."""
    ref_sums: Tensor | None = tensor("B")
    """Sum of the log-probabilities of the row's trained tokens under the frozen reference model,
    float32 `[B]`."""
    divergence: Tensor | None = tensor("B")
    """Divergence between policy and reference, float32 `[B]`: one number per update, estimated from
    all samples of the update and repeated in all rows."""


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(TrainBatch):
    """Generated samples on their way through reward, scoring, advantage and training. The trained
    tokens are those that the policy wrote.

    The class is frozen: a step returns `dataclasses.replace(batch, advantages=...)`, so the code of
    a step shows which fields the step sets.

    Example: two siblings of one prompt, with 2 and 2 tokens of prompt and 3 and 1 of response:
        tokens [[5, 6, 7, 8, 1], [5, 6, 1, 0, 0]], lengths [5, 3],
        loss_mask [[0, 0, 1, 1, 1], [0, 0, 1, 0, 0]], group_ids [0, 0]
    """

    sample_ids: list[str]
    """`<group>/<sibling>` of each sample."""
    tags: list[str]
    """Tag of each prompt, which says where the prompt came from. The tag decides which rewards
    score the sample, and metrics are grouped by tag."""
    group_ids: Tensor = tensor("B", required=True)
    """Id of each sample's group, int64 `[B]`; siblings of one prompt have the same id."""
    rewards: Tensor | None = tensor("B")
    """Total reward of each sample, float32 `[B]`."""
    turn_rewards: Tensor | None = tensor("B")
    """Sum of the rewards that an environment gave for turns (`credit: turns`), float32 `[B]`. They
    stand in `token_rewards`, not in `rewards`, and are as much the outcome of the sample as these.
    None without any."""
    has_reward: Tensor | None = tensor("B")
    """False where a reward failed, bool `[B]`; None where every sample has a reward. A row with
    False has no trained tokens, and statistics must leave its `rewards` out."""
    named_rewards: Tensor | None = tensor("BR")
    """Score of each reward before its weight is applied, float32 `[B, R]`, in the order of the
    config; 0 where the reward does not score samples of this tag."""
    reward_weights: Tensor | None = tensor("BR")
    """Weight of each entry of `named_rewards`, float32 `[B, R]`; 0 where the reward does not score
    samples of this tag. `rewards` is the sum of score times weight, until a shaping step changes
    `rewards`."""
    baseline_rewards: Tensor | None = tensor("B")
    """Total reward of a greedy response to the same prompt, float32 `[B]`; NaN for samples of tags
    whose advantages do not compare with one."""
    token_rewards: Tensor | None = tensor("BT")
    """Reward of single tokens in addition to `rewards`, float32 `[B, T]`: a KL penalty, or the
    reward of one step of a response. None if no token has any."""
    step_rewards: Tensor | None = tensor("BT")
    """The part of `token_rewards` that process rewards gave, float32 `[B, T]`; None without any."""
    step_ends: Tensor | None = tensor("BT")
    """True at tokens that have a process reward, which may be 0, bool `[B, T]`; None without."""
    sample_weights: Tensor | None = tensor("B")
    """Weight of each sample in the loss, relative to other samples, float32 `[B]`, above zero; None
    if all count the same."""
    truncated: Tensor | None = tensor("B")
    """True where the response ended at the length limit, bool `[B]`."""
    row_tokens: Tensor | None = tensor("B")
    """Number of tokens of the longest row of each sample, int64 `[B]`; None if each has one row."""
    turns: list[tuple[Turn, ...]] | None = None
    """Turns of the policy of each sample, if samples are episodes."""
    rollout_logprobs: Tensor | None = tensor("BT")
    """Log-probabilities of the tokens as the engine reported them, float32 `[B, T]`; zero outside
    the response."""
    old_logprobs: Tensor | None = tensor("BT")
    """Log-probabilities of the tokens, which the trainer computes before the first update of the
    step, float32 `[B, T]`; or those of the engine, with `old_logprobs: rollout`. None if a step has
    one update: the current ones are the old ones, then."""
    squared_probs: Tensor | None = tensor("BT")
    """Sum over the vocabulary of the squared probabilities of the distribution that each token was
    drawn from, in the forward pass of `old_logprobs`, float32 `[B, T]`; None unless the algorithm
    needs it."""
    ref_logprobs: Tensor | None = tensor("BT")
    """Log-probabilities of the tokens under the frozen reference model, float32 `[B, T]`; None
    without a reference."""
    teacher_logprobs: Tensor | None = tensor("BT")
    """Log-probabilities of the tokens under the teacher that the sample's tag names, float32
    `[B, T]`; None without teachers."""
    values: Tensor | None = tensor("BT")
    """Values that the critic predicts, float32 `[B, T]`; None without a critic."""
    implicit_rewards: Tensor | None = tensor("BT")
    """Rewards of tokens that `process_reward` has learned, float32 `[B, T]`; zero outside
    `loss_mask`. None without this role."""
    advantages: Tensor | None = tensor("BT")
    """Advantage of each token, float32 `[B, T]`; zero outside `loss_mask`."""
    returns: Tensor | None = tensor("BT")
    """Targets that the critic learns to predict, float32 `[B, T]`; zero outside `loss_mask`. None
    without a critic."""
    importance_weights: Tensor | None = tensor("BT")
    """Factors of the policy loss, float32 `[B, T]`: probability under the trainer divided by
    probability under the engine, bounded. They correct for the difference between the two. Zero
    outside `loss_mask`. None without `algorithm.correction`."""
    chosen_tokens: Tensor | None = tensor("BT")
    """True for tokens that a loss term treats differently from the others, bool `[B, T]`; chosen by
    comparing all tokens of the update."""

    def trained_tokens(self) -> Tensor:
        """Return the number of trained tokens of each sample, int64 `[B]`."""
        return self.loss_mask.sum(1)

    def keep(self, kept_B: Tensor) -> Self:
        """Return the batch with only the tokens of those samples trained that are `kept_B`, bool
        `[B]`."""
        return replace(self, loss_mask=self.loss_mask & kept_B[:, None])


@dataclass(frozen=True, kw_only=True)
class PairedRollouts(RolloutBatch):
    """Pairs of responses to one prompt: rows 0, 2, 4, ... are the better ones, and the row after
    each of them is the worse one."""

    unit: ClassVar[int] = 2


def _widened(values_BT: Tensor, batch: TokenBatch) -> Tensor:
    """Return the values with zeros behind them, as wide as the tokens of the batch."""
    return pad(values_BT, [0, batch.tokens.shape[1] - values_BT.shape[1]])
