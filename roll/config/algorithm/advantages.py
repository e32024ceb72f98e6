"""Advantage estimators: a tagged union, one class per choice."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from roll.config.algorithm.needs import Choice, Need


class GaeConfig(Choice):
    """sum over later tokens j of (gamma * lambda) ** (j - t) * (reward_j + gamma * value_{j+1} -
    value_j), from a critic's values (GAE, arXiv 1506.02438).

    For long responses or several turns, where one number per response credits too much alike; the
    price is a second model to train.
    """

    kind: Literal["gae"] = "gae"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.CRITIC})
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per trained token."""
    policy_lambda: float | None = Field(default=0.95, ge=0, le=1)
    """Lambda of the policy's advantage: 1 trusts the rewards alone (no bias, most variance), 0 the
    next value alone. `null` with `adaptive_alpha`."""
    adaptive_alpha: float | None = Field(default=None, gt=0)
    """Sets the policy's lambda of each response to 1 - 1 / (adaptive_alpha * trained tokens), at
    least 0, in place of `policy_lambda` (VAPO, arXiv 2504.05118, uses 0.05); for responses whose
    lengths differ much."""
    critic_lambda: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's target; left out: the policy's. 1 keeps a critic unbiased on long
    responses whatever the policy's lambda (decoupled GAE, VC-PPO, arXiv 2503.01491)."""

    @model_validator(mode="after")
    def _one_lambda(self) -> GaeConfig:
        if self.policy_lambda is None and self.adaptive_alpha is None:
            raise ValueError("the policy needs a lambda: set policy_lambda or adaptive_alpha")
        if self.policy_lambda is not None and self.adaptive_alpha is not None:
            raise ValueError(
                f"adaptive_alpha takes the place of policy_lambda, which is {self.policy_lambda}; "
                "set policy_lambda to null or leave adaptive_alpha out"
            )
        return self


class GrpoConfig(Choice):
    """(reward - group baseline) / (std + eps) (GRPO, arXiv 2402.03300; with std `none` Dr.GRPO,
    arXiv 2503.20783).

    The first choice where answers can be verified: no critic, and 8 or more samples per prompt tell
    good from bad.
    """

    kind: Literal["grpo"] = "grpo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted: the group's mean, or the mean of the OTHER samples of the group, which
    keeps the gradient unbiased."""
    std: Literal["group", "batch", "none"] = "group"
    """What the centred reward is divided by: the spread of its group (the sample itself included),
    of the whole step, or nothing, which leaves prompts of all difficulties their natural weight."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class RlooConfig(Choice):
    """reward - mean reward of the other samples of its prompt (RLOO, arXiv 2402.14740).

    An unbiased gradient with as few as two samples per prompt; the scale of the rewards stays, so
    it suits scores of a reward model.
    """

    kind: Literal["rloo"] = "rloo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})


class OpoConfig(Choice):
    """reward - sum(tokens * reward) / sum(tokens) over the group: the baseline of least variance
    on-policy (OPO, arXiv 2505.23585).

    For one update per step and responses whose lengths differ much.
    """

    kind: Literal["opo"] = "opo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})


class PassKConfig(Choice):
    """With s successes, w failures and f = C(w, k) / C(s + w, k): sqrt(f / (1 - f)) for a success,
    -(s / w) times that for a failure (pass@k training, arXiv 2508.10751).

    For policies that must keep exploring: hard prompts weigh most, easy ones hardly anything.
    """

    kind: Literal["pass_k"] = "pass_k"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    k: int = Field(ge=1)
    """Samples that have one success to find between them. More than 1 keeps exploring where single
    samples rarely succeed; below data.samples_per_prompt."""
    threshold: float = 0.5
    """A total reward above it is a success."""


class GdpoConfig(Choice):
    """Sum over rewards of weight * (reward - group mean) / (group std + eps), then minus its mean
    and over its std in the whole step (GDPO, arXiv 2601.05242); for several rewards at once, each
    with the `weight` of its own entry in `rewards:`."""

    kind: Literal["gdpo"] = "gdpo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    eps: float = Field(default=1e-6, gt=0)
    """Added to each standard deviation."""


class ReinforceConfig(Choice):
    """The reward itself, discounted from the last token, minus a baseline (REINFORCE, Williams
    1992).

    For one sample per prompt, and for rewards that already are advantages (+1 and -1, or 0 and 1
    where failures are to be left alone).
    """

    kind: Literal["reinforce"] = "reinforce"
    baseline: Literal["none", "batch"] = "none"
    """`batch` subtracts the mean reward of the step."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, counted back from the last trained token."""


class ReinforcePpConfig(Choice):
    """Discounted rewards from each token on, minus their mean and over their std in all trained
    tokens of the step (REINFORCE++, arXiv 2501.03262).

    For one sample per prompt with rewards of many sizes, or, with the group's baseline, where the
    spread of a small group is too noisy to divide by.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: Literal["none", "group"] = "none"
    """`group` subtracts the mean reward of its prompt's samples first (REINFORCE++-baseline, which
    the paper combines with a `kl` loss term of k2 in place of a KL in the reward)."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token, counted back from the token that is paid."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""

    @property
    def all_needs(self) -> frozenset[Need]:
        return self.needs | ({Need.SIBLINGS} if self.baseline == "group" else frozenset())


class RemaxConfig(Choice):
    """reward - reward of a greedy response to the same prompt (ReMax, arXiv 2310.10505); a baseline
    for one sample per prompt, at the price of one more response."""

    kind: Literal["remax"] = "remax"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.GREEDY_BASELINE})


class DistillConfig(Choice):
    """coef * (teacher log-prob - policy log-prob) of each token + mix * (reward - group mean) /
    (group std + eps) (on-policy distillation, arXiv 2306.13649).

    For a stronger model's skill at the price of one forward pass of it per sample; it needs no
    reward, and with `mix` takes one besides.
    """

    kind: Literal["distill"] = "distill"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEACHER})
    coef: float = Field(default=1.0, gt=0)
    """Of the teacher's part, which is in nats per token."""
    mix: float = Field(default=0.0, ge=0)
    """Of the reward's part; 0 is pure distillation, which no reward changes."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation of the reward's part."""

    @property
    def all_needs(self) -> frozenset[Need]:
        return self.needs | ({Need.SIBLINGS} if self.mix else frozenset())


AdvantageConfig = Annotated[
    GaeConfig
    | GrpoConfig
    | RlooConfig
    | OpoConfig
    | PassKConfig
    | GdpoConfig
    | ReinforceConfig
    | ReinforcePpConfig
    | RemaxConfig
    | DistillConfig,
    Field(discriminator="kind"),
]
