"""Loss terms: a tagged union, one class per choice. A is the advantage; ratio is new over old."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll.config.algorithm.divergences import DistillTargetConfig, DivergenceConfig, ReverseKlConfig
from roll.config.algorithm.needs import Choice, Need
from roll.config.base import Config


class LossChoice(Choice):
    """The base of every entry of `algorithm.loss`."""

    estimates_policy_gradient: ClassVar[bool] = False
    """A loss has at most one such term: two would add up to a step that is twice as long."""
    whole_sequences: ClassVar[bool] = False
    """The gradient of a token depends on the loss of all tokens of its sample."""
    reads_advantages: ClassVar[bool] = True
    """Whether what the samples are worth enters the term."""
    of_the_forward_pass: ClassVar[frozenset[str]] = frozenset()
    """Fields that say what the model computes, not what the term makes of it."""


class PolicyChoice(LossChoice):
    """The base of terms that estimate the policy gradient."""

    estimates_policy_gradient: ClassVar[bool] = True
    coef: float = Field(default=1.0, gt=0)
    """Factor of the term."""


class PgConfig(PolicyChoice):
    """-A * log p: the plain policy gradient, no ratio and no clip (REINFORCE, Williams 1992).

    For one update per step; with several, later updates do not know that the policy has moved.
    """

    kind: Literal["pg"] = "pg"


class PpoClipConfig(PolicyChoice):
    """Clipped surrogate (PPO, arXiv 1707.06347; clip_high > clip_low is DAPO's clip-higher):
    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    The default for several updates per step; a larger `clip_high` keeps the entropy up.
    """

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound of the loss for negative advantages, as a multiple of -advantage (arXiv 1912.09729,
    which uses 3)."""


class GspoConfig(PolicyChoice):
    """One clipped ratio per response, the geometric mean of its tokens' (GSPO, arXiv 2507.18071):
    -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean log ratio).

    For mixtures of experts and long responses, where ratios of tokens are mostly noise. The paper
    averages over responses: `aggregation: sequence_mean`.
    """

    kind: Literal["gspo"] = "gspo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    whole_sequences: ClassVar[bool] = True
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low. It is a mean, so it moves far less than the
    ratio of a token."""
    clip_high: float = Field(default=4e-4, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""
    token_level: bool = False
    """GSPO-token: the same ratio, but each token's gradient has the advantage of that token; for
    advantages that differ within a response (several turns, a critic)."""


class GmpoConfig(PolicyChoice):
    """Tokens clipped inside a geometric mean (GMPO, arXiv 2507.20673): -g * A, g = exp(mean c),
    c = min(log ratio, clip_high) where A >= 0 and max(log ratio, -clip_low) elsewhere.

    For ratios with outliers: wider clips than PPO's without its jumps. The paper averages over
    responses: `aggregation: sequence_mean`.
    """

    kind: Literal["gmpo"] = "gmpo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    whole_sequences: ClassVar[bool] = True
    clip_low: float = Field(default=0.4, gt=0)
    """The log-ratio of a token is clipped from below at -clip_low: 0.4 is a ratio of 0.67."""
    clip_high: float = Field(default=0.4, gt=0)
    """The log-ratio of a token is clipped from above at clip_high: 0.4 is a ratio of 1.49."""


class CispoConfig(PolicyChoice):
    """Clipped importance weights (CISPO, arXiv 2506.13585): no token's gradient is cut off.
    -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log p.

    For many updates per step, and for data that lags behind: rare tokens that start a new thought
    keep their gradient.
    """

    kind: Literal["cispo"] = "cispo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """The weight is clipped from below at 1 - clip_low; left out: no lower bound, as in the paper,
    which tunes clip_high alone."""
    clip_high: float = Field(default=4.0, gt=0)
    """The weight is clipped from above at 1 + clip_high. The paper gives no number; arXiv
    2510.13786 compares bounds of the weight around the 5 that this default is, and finds results
    to depend little on it."""


class SapoConfig(PolicyChoice):
    """A smooth gate in the place of a clip (SAPO, arXiv 2511.20347): -f(ratio) * A with
    f(x) = sigmoid(tau * (x - 1)) * 4 / tau.

    Where a hard clip makes training jump, as with mixtures of experts. The paper averages over
    responses: `aggregation: sequence_mean`.
    """

    kind: Literal["sapo"] = "sapo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    tau_pos: float = Field(default=1.0, gt=0)
    """Steepness of the gate where A > 0."""
    tau_neg: float = Field(default=1.05, gt=0)
    """Steepness of the gate elsewhere; larger than tau_pos to hold bad tokens back sooner."""


class ToprConfig(PolicyChoice):
    """No ratio for good responses, a truncated one for bad ones (TOPR, arXiv 2503.14286):
    -sg(w) * A * log p, w = 1 where A >= 0 and min(ratio of the response, 1) elsewhere.

    For samples that are old or another policy's, failures included. The paper sums over a
    response: `aggregation: sequence_sum`.
    """

    kind: Literal["topr"] = "topr"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    positive_weight: float = Field(default=1.0, ge=0)
    """Factor where A >= 0; the paper has 1."""
    negative_weight: float = Field(default=1.0, ge=0)
    """Factor where A < 0; the paper has 1."""

    @model_validator(mode="after")
    def _trains(self) -> Self:
        if self.positive_weight == 0 and self.negative_weight == 0:
            raise ValueError(
                "positive_weight and negative_weight are both 0, so nothing is trained"
            )
        return self


class KimiConfig(PolicyChoice):
    """Mirror descent (Kimi k1.5, arXiv 2501.12599): -A * log p + tau / 2 * (log ratio)**2 with the
    log-ratio of the whole response to the policy that generated it.

    For several updates per step, with a pull back in place of a clip. The paper's A is the reward
    minus the group's mean (`grpo` with `std: none`), and it sums over a response:
    `aggregation: sequence_sum`.
    """

    kind: Literal["kimi"] = "kimi"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    tau: float = Field(default=0.1, gt=0)
    """Strength of the pull back to the old policy. The paper gives no number."""
    level: Literal["token", "sequence"] = "sequence"
    """What is squared: the response's log-ratio, or each token's."""


class DroConfig(PolicyChoice):
    """Direct reward optimisation (DRO, arXiv 2405.19107): -A * log p + tau / 2 *
    (log p - log p_ref)**2 with the log-probs of the whole response.

    For one sample per prompt that somebody else drew and rated. The paper sums over a response:
    `aggregation: sequence_sum`.
    """

    kind: Literal["dro"] = "dro"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.REFERENCE})
    tau: float = Field(default=1.0, gt=0)
    """Strength of the pull to the reference."""
    level: Literal["token", "sequence"] = "sequence"
    """What is squared: the response's log-ratio, or each token's."""


class ClipCovConfig(PolicyChoice):
    """Clipped surrogate, and 0 on a few tokens whose log-prob and advantage vary together and so
    cost the most entropy (Clip-Cov, arXiv 2505.22617): drawn from those where cov_low <
    (log p - mean log p) * (A - mean A) < cov_high, means over the update's trained tokens.

    Where the entropy collapses and an entropy bonus is too blunt.
    """

    kind: Literal["clip_cov"] = "clip_cov"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped from below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped from above at 1 + clip_high."""
    fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of an update's trained tokens that lose their gradient; at least one token does."""
    cov_low: float = 1.0
    """They are drawn from the tokens with a covariance above this."""
    cov_high: float = 5.0
    """They are drawn from the tokens with a covariance below this."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(
                f"cov_low = {self.cov_low} is not below cov_high = {self.cov_high}, so no token "
                "lies between"
            )
        return self


class KlCovConfig(PolicyChoice):
    """-ratio * A, plus penalty * |log ratio| on the tokens whose log-prob and advantage vary
    together most and so cost the most entropy (KL-Cov, arXiv 2505.22617): those with the largest
    (log p - mean log p) * (A - mean A), means over the update's trained tokens.

    As `clip_cov`, for larger models: a penalty in the place of a cut, which held the entropy more
    steadily in the paper.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS, Need.RATIO})
    fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of an update's trained tokens with the penalty, those of the highest covariance; at
    least one token. The paper has 2e-3 for 7B and 2e-4 for 32B."""
    penalty: float = Field(default=1.0, gt=0)
    """Factor of the penalty, relative to the term."""


class NllConfig(LossChoice):
    """-log p on the tokens of samples with a positive advantage: imitates what went well
    (positive-example LM loss of VAPO, arXiv 2504.05118).

    Beside a policy term, where successes are rare. The paper averages over the tokens of the good
    samples alone, this term, as all, over every token of the update.
    """

    kind: Literal["nll"] = "nll"
    coef: float = Field(default=0.1, gt=0)
    """Factor of the term."""


class KlConfig(LossChoice):
    """Divergence from the reference model, as a loss term, estimated from d = log p - log p_ref
    (http://joschu.net/blog/kl-approx.html): k1 = d, k2 = d**2 / 2, k3 = exp(-d) - 1 + d.

    For rewards that can be gamed, such as those of a model; verifiable ones mostly do without.
    """

    kind: Literal["kl"] = "kl"
    reads_advantages: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset({Need.REFERENCE})
    coef: float = Field(default=0.001, ge=0)
    """Factor of the term."""
    estimator: Literal["k1", "k2", "k3", "k3_k2grad"] = "k3"
    """k1: the log-ratio, whose gradient is noise; k2: half its square, the gradient of KL(policy ||
    reference); k3: never negative and bounded, the gradient of KL(reference || policy); k3_k2grad:
    the value of k3 and the gradient of k2."""


class EntropyConfig(LossChoice):
    """Entropy bonus: subtracts `coef` times the policy's entropy (arXiv 1602.01783).

    Where the policy stops exploring; a large one rewards noise.
    """

    kind: Literal["entropy"] = "entropy"
    reads_advantages: ClassVar[bool] = False
    coef: float = Field(ge=0)
    """Factor of the entropy, in nats."""


class DistillTermConfig(DistillTargetConfig, LossChoice):
    """Divergence from the teacher's distribution of every token of the policy's own samples
    (on-policy distillation, arXiv 2306.13649).

    For a stronger model's skill, by itself or beside a reward. The advantage `distill` gets by with
    the teacher's log-prob of the one token that was sampled, and is noisier.
    """

    kind: Literal["distill"] = "distill"
    reads_advantages: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEACHER})
    of_the_forward_pass: ClassVar[frozenset[str]] = frozenset(DistillTargetConfig.model_fields)
    coef: float = Field(default=1.0, gt=0)
    """Factor of the divergence, in nats."""
    divergence: DivergenceConfig = ReverseKlConfig()
    """Of the two distributions."""


LossTermConfig = Annotated[
    PgConfig
    | PpoClipConfig
    | GspoConfig
    | GmpoConfig
    | CispoConfig
    | SapoConfig
    | ToprConfig
    | KimiConfig
    | DroConfig
    | ClipCovConfig
    | KlCovConfig
    | NllConfig
    | KlConfig
    | EntropyConfig
    | DistillTermConfig,
    Field(discriminator="kind"),
]


class ValueLossConfig(Config):
    """The critic's loss: 0.5 * max((v - R)**2, (clip(v, old - clip, old + clip) - R)**2) with the
    returns R (the value loss of PPO's code; arXiv 2005.12729)."""

    clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from the old one within a step, in units of the reward; null: no
    bound."""
