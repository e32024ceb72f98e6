"""Advantage estimators: a tagged union, one class per choice."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from roll.config.algorithm.needs import Choice, Need
from roll.config.user_code.own import OrOwn, OwnPart


class GaeConfig(Choice):
    """Generalised advantage estimation with a critic (GAE, arXiv 1506.02438): sum over tokens j >=
    t of (gamma * lambda) ** (j - t) * (reward_j + gamma * value_{j+1} - value_j).

    For long responses or several turns, where one advantage for the whole response credits all its
    tokens alike. The price is a second model to train.
    """

    kind: Literal["gae"] = "gae"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.CRITIC})
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per trained token."""
    policy_lambda: float | None = Field(default=0.95, ge=0, le=1)
    """Lambda of the policy's advantage. 1 uses only the rewards (no bias, highest variance); 0 uses
    only the value of the next token. Set it to `null` with `adaptive_alpha`."""
    adaptive_alpha: float | None = Field(default=None, gt=0)
    """Replaces `policy_lambda` by 1 - 1 / (adaptive_alpha * trained tokens), at least 0, computed
    for each response (VAPO, arXiv 2504.05118, uses 0.05). For responses of very different lengths.
    null: off."""
    critic_lambda: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's target. If left out: the lambda of the policy. 1 keeps the critic
    unbiased on long responses, whatever the policy's lambda is (decoupled GAE, VC-PPO, arXiv
    2503.01491)."""

    @model_validator(mode="after")
    def _one_lambda(self) -> GaeConfig:
        """Require exactly one of `policy_lambda` and `adaptive_alpha`."""
        if self.policy_lambda is None and self.adaptive_alpha is None:
            raise ValueError("the policy needs a lambda: set policy_lambda or adaptive_alpha")
        if self.policy_lambda is not None and self.adaptive_alpha is not None:
            raise ValueError(
                f"adaptive_alpha takes the place of policy_lambda, which is {self.policy_lambda}; "
                "set policy_lambda to null or leave adaptive_alpha out"
            )
        return self


class GrpoConfig(Choice):
    """Group-relative advantage: (reward - group baseline) / (std + eps) (GRPO, arXiv 2402.03300;
    with `std: none` Dr.GRPO, arXiv 2503.20783).

    The first choice where answers can be verified: no critic is needed, and 8 or more samples per
    prompt are enough to tell good responses from bad ones.
    """

    kind: Literal["grpo"] = "grpo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Number subtracted from a reward: the mean of the group (`mean`), or the mean of the OTHER
    samples of the group (`leave_one_out`), which keeps the gradient unbiased."""
    std: Literal["group", "batch", "none"] = "group"
    """Standard deviation by which the centred reward is divided: of the group (`group`, the sample
    itself included) or of the whole step (`batch`). `none` divides by nothing, so prompts of every
    difficulty keep their natural weight."""
    eps: float = Field(default=1e-6, gt=0)
    """Number added to the standard deviation before the division."""
    process: Literal["steps", "total"] = "steps"
    """Use of the rewards of single steps (`process: true` of a reward). `steps`: each is
    normalised like a reward, over the steps of all samples of the prompt, and a token gets the sum
    of those that end at or after it (process supervision, section 4.1.3), in addition to the
    advantage of its sample. `total`: they are added to the reward of the sample."""


class RlooConfig(Choice):
    """Leave-one-out advantage: reward - mean reward of the other samples of the prompt (RLOO, arXiv
    2402.14740).

    The gradient is unbiased with as few as two samples per prompt. Rewards keep their scale, so
    this suits the scores of a reward model.
    """

    kind: Literal["rloo"] = "rloo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})


class PrimeConfig(Choice):
    """Leave-one-out advantage of the sample + that of its tokens, from implicit process rewards
    (PRIME, arXiv 2502.01456). The first is that of `rloo`. The second is the sum over tokens j >= t
    of gamma ** (j - t) * (implicit reward of j - baseline), times `process_coef`, where the
    baseline is the mean, over the other samples of the prompt, of the mean implicit reward of their
    tokens.

    For long responses, where the reward comes at the end only: a model that learns from the same
    rewards says which tokens led there. The price is a second model to train, and a reference.
    """

    kind: Literal["prime"] = "prime"
    needs: ClassVar[frozenset[Need]] = frozenset(
        {Need.SIBLINGS, Need.PROCESS_REWARD, Need.REFERENCE}
    )
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per trained token of the implicit rewards."""
    process_coef: float = Field(default=1.0, gt=0)
    """Factor of the part from implicit rewards."""


class GpgConfig(Choice):
    """Advantage of group policy gradient: alpha * (reward - group mean), where alpha is the number
    of groups of the step divided by the number of those whose rewards differ (GPG, arXiv
    2504.02546).

    Keeps the size of a step where many prompts are solved always or never: their groups have no
    gradient, but count in the mean. Or draw other prompts in their place: `rollout.filters` with
    `equal_rewards`, where alpha is 1. The paper has the loss `pg`.
    """

    kind: Literal["gpg"] = "gpg"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})


class OpoConfig(Choice):
    """Advantage with the optimal baseline: reward - sum(tokens * reward) / sum(tokens) over the
    group, which has the least variance on-policy (OPO, arXiv 2505.23585).

    For one update per step and responses of very different lengths.
    """

    kind: Literal["opo"] = "opo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})


class OtbConfig(Choice):
    """Advantage with the optimal baseline of each token: G - sum(W * G) / sum(W), sums over the
    samples of the group that have a t-th token, where G is the sum of the rewards from token t on
    (OTB, arXiv 2602.07078). W, the realized energy of a sample, is the sum over its tokens up to t
    of 1 - 2 * p + sum(q**2): the squared norm of the gradient of the token's log-prob by the
    logits, where p is the token's probability, and q are those of the whole vocabulary.

    For long responses and groups of few samples, whose gradients vary most. Where only one sample
    is left, its advantage is 0.
    """

    kind: Literal["otb"] = "otb"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS, Need.SQUARED_PROBS})
    eps: float = Field(default=1e-8, gt=0)
    """Number added to each W, so that the baseline is a plain mean where all tokens were
    certain."""


class PassKConfig(Choice):
    """Advantage for pass@k (pass@k training, arXiv 2508.10751). In a group with s successes and w
    failures, and with f = C(w, k) / C(s + w, k), a success gets a = sqrt(f / (1 - f)) and a failure
    gets -(s / w) * a.

    For policies that must keep exploring: hard prompts weigh most, easy prompts weigh very little.
    """

    kind: Literal["pass_k"] = "pass_k"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    k: int = Field(ge=1)
    """Number of samples of which at least one should succeed. Above 1, training keeps exploring
    where single samples rarely succeed. Must be below data.samples_per_prompt."""
    threshold: float = 0.5
    """Total reward above which a sample counts as a success."""


class WinRateConfig(Choice):
    """Advantage by comparison: the mean chance of a sample to beat the samples of its prompt, minus
    a half (SPPO, arXiv 2405.00675).

    For rewards whose order says more than their size, such as the scores of a judge; advantages lie
    between -1/2 and 1/2. With the loss `kimi` and `aggregation: sequence_sum` this is SPPO: the
    squared loss (log ratio - eta * advantage)**2, divided by 2 * eta, with tau = 1 / eta.
    """

    kind: Literal["win_rate"] = "win_rate"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    scale: float | None = Field(default=None, gt=0)
    """Divisor of the difference of two rewards, whose logistic function is then the chance to win
    (Bradley-Terry); 1 for the scores of a reward model. If left out: the higher reward wins, and
    equal rewards are a draw."""


class GdpoConfig(Choice):
    """Advantage from several rewards, each normalised by itself: the sum over rewards of weight *
    (reward - group mean) / (group std + eps), then minus its mean and divided by its std over the
    whole step (GDPO, arXiv 2601.05242). The `weight` of a reward is set in its entry in
    `rewards:`."""

    kind: Literal["gdpo"] = "gdpo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    eps: float = Field(default=1e-6, gt=0)
    """Number added to each standard deviation before the division."""


class ReinforceConfig(Choice):
    """Reward discounted from the last token, minus a baseline (REINFORCE, Williams 1992).

    For one sample per prompt, and for rewards that are already advantages (+1 and -1; or 0 and 1
    where failures should have no effect).
    """

    kind: Literal["reinforce"] = "reinforce"
    baseline: Literal["none", "batch"] = "none"
    """Baseline: the mean reward of the step (`batch`), or none."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, counted back from the last trained token."""


class ReinforcePpConfig(Choice):
    """Sum of discounted rewards from each token on, minus the mean and divided by the std of these
    sums over all trained tokens of the step (REINFORCE++, arXiv 2501.03262).

    For one sample per prompt and rewards of very different sizes; or, with `baseline: group`, where
    the spread of a small group is too noisy to divide by.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "none"
    """Baseline subtracted first: the mean reward of the samples of the same prompt (`group`), or
    none. With `group` this is REINFORCE++-baseline, which the paper combines with a `kl` loss term
    with the k2 estimator in place of a KL in the reward."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, counted back from the token that gets the reward."""
    eps: float = Field(default=1e-6, gt=0)
    """Number added to the standard deviation before the division."""

    @property
    def all_needs(self) -> frozenset[Need]:
        """`needs`, plus two or more samples per prompt if the baseline is that of the group."""
        return self.needs | ({Need.SIBLINGS} if self.baseline == "group" else frozenset())


class RemaxConfig(Choice):
    """Advantage over the greedy response: reward - reward of a greedy response to the same prompt
    (ReMax, arXiv 2310.10505). Gives a baseline for one sample per prompt; the price is one more
    response per prompt."""

    kind: Literal["remax"] = "remax"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.GREEDY_BASELINE})


class GigpoConfig(Choice):
    """Advantage of the episode + step_coef * advantage of the turn (GiGPO, arXiv 2505.10978). The
    first is (reward - group mean) / (std + eps) over the episodes of the task; the second is the
    same for the discounted returns of those turns of the task that began in the same state.

    For agents whose environment names its states (`info["state"]`), where the reward of the whole
    episode says little about single turns. What an episode has beyond the rewards of its turns
    belongs to the last one; shaping by `scale`, `clip` or `normalize`, and `kl_in_reward`, which
    change all turns, are refused.
    """

    kind: Literal["gigpo"] = "gigpo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS, Need.TURNS})
    gamma: float = Field(default=0.95, gt=0, le=1)
    """Discount per turn."""
    step_coef: float = Field(default=1.0, ge=0)
    """Factor of the advantage of the turn."""
    std: Literal["group", "none"] = "group"
    """Divide both advantages by their standard deviations, or by nothing."""
    eps: float = Field(default=1e-6, gt=0)
    """Number added to the standard deviations before the division."""


class TurnGaeConfig(Choice):
    """Generalised advantage estimation over turns, with a critic (arXiv 2512.17008): sum over turns
    j >= k of (gamma * turn_lambda) ** (j - k) * (reward_j + gamma * value_{j+1} - value_j). With
    `token_lambda`, a turn divides it among its tokens (bi-level, arXiv 2510.16907).

    For agents with many turns, where `gae` over tokens discounts a reward by the words in between.
    The price is a second model to train. Refuses the shaping that `gigpo` refuses.
    """

    kind: Literal["turn_gae"] = "turn_gae"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.CRITIC, Need.TURNS})
    gamma: float = Field(default=0.99, gt=0, le=1)
    """Discount per turn."""
    turn_lambda: float = Field(default=0.95, ge=0, le=1)
    """Lambda from turn to turn. 1 uses only the rewards; 0 only the value of the next turn."""
    token_lambda: float | None = Field(default=None, ge=0, le=1)
    """Lambda from token to token of a turn. If left out, all tokens of a turn have the advantage of
    the turn."""


class DistillConfig(Choice):
    """Advantage from a teacher: coef * (teacher log-prob - policy log-prob) of each token + mix *
    (reward - group mean) / (group std + eps) (on-policy distillation, arXiv 2306.13649).

    For learning from a stronger model at the price of one forward pass of that model per sample. No
    reward is needed; `mix` above 0 adds one.
    """

    kind: Literal["distill"] = "distill"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEACHER})
    coef: float = Field(default=1.0, gt=0)
    """Factor of the teacher's part, which is in nats per token."""
    mix: float = Field(default=0.0, ge=0)
    """Factor of the reward's part. 0 is pure distillation: rewards have no effect."""
    eps: float = Field(default=1e-6, gt=0)
    """Number added to the standard deviation in the reward's part."""

    @property
    def all_needs(self) -> frozenset[Need]:
        """`needs`, plus two or more samples per prompt if `mix` is not 0."""
        return self.needs | ({Need.SIBLINGS} if self.mix else frozenset())


class OwnAdvantageConfig(OwnPart, Choice):
    """Base of the estimators that users bring; see `roll.algorithms.own.bases`."""

    sort: ClassVar[str] = "advantage estimator"
    place: ClassVar[str] = "algorithm.advantage"


AdvantageConfig = Annotated[
    GaeConfig
    | GrpoConfig
    | RlooConfig
    | PrimeConfig
    | GpgConfig
    | OpoConfig
    | OtbConfig
    | PassKConfig
    | WinRateConfig
    | GdpoConfig
    | ReinforceConfig
    | ReinforcePpConfig
    | RemaxConfig
    | GigpoConfig
    | TurnGaeConfig
    | DistillConfig,
    Field(discriminator="kind"),
    OrOwn(OwnAdvantageConfig, "roll.extend.Advantage or roll.extend.SampleAdvantage"),
]
