"""Loss terms: a tagged union, one class per choice. A is the advantage; ratio is new over old."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from roll.config.algorithm.divergences import DistillTargetConfig, DivergenceConfig, ReverseKlConfig
from roll.config.algorithm.loss_choice import LossChoice, PolicyChoice
from roll.config.algorithm.needs import Need
from roll.config.algorithm.preferences import PreferenceTermConfig, SpinConfig
from roll.config.base import Config
from roll.config.user_code.own import OrOwn, OwnPart


class PgConfig(PolicyChoice):
    """Plain policy gradient, -A * log p, with no ratio and no clip (REINFORCE, Williams 1992).

    For one update per step. With several updates, the later ones do not take into account that the
    policy has changed since the samples were generated.
    """

    kind: Literal["pg"] = "pg"


class PpoClipConfig(PolicyChoice):
    """Clipped surrogate (PPO, arXiv 1707.06347; clip_high > clip_low is DAPO's clip-higher):
    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    The default for several updates per step. A larger `clip_high` keeps the entropy higher.
    """

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper bound of the ratio is 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest loss of a token with a negative advantage, as a multiple of -A (arXiv 1912.09729,
    which uses 3). null: no such bound."""


class GspoConfig(PolicyChoice):
    """Clipped surrogate with one ratio per response, the geometric mean of the ratios of its tokens
    (GSPO, arXiv 2507.18071): -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), s = exp(mean
    log ratio).

    For mixtures of experts and long responses, where the ratios of single tokens are mostly noise.
    The paper averages over responses: `aggregation: sequence_mean`.
    """

    kind: Literal["gspo"] = "gspo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    whole_sequences: ClassVar[bool] = True
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Lower bound of the ratio is 1 - clip_low. The ratio of a response is a mean, so it moves much
    less than the ratio of a token."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Upper bound of the ratio is 1 + clip_high."""
    token_level: bool = False
    """True selects GSPO-token: the ratio is the same, but the gradient of each token uses the
    advantage of that token. For advantages that differ within a response (several turns, or a
    critic)."""


class GmpoConfig(PolicyChoice):
    """Geometric mean of clipped token ratios (GMPO, arXiv 2507.20673): -g * A, g = exp(mean c), c =
    min(log ratio, clip_high) where A >= 0 and max(log ratio, -clip_low) elsewhere.

    For ratios with outliers: the clip range can be wider than PPO's without unstable updates. The
    paper averages over responses: `aggregation: sequence_mean`.
    """

    kind: Literal["gmpo"] = "gmpo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    whole_sequences: ClassVar[bool] = True
    clip_low: float = Field(default=0.4, gt=0)
    """Lower bound of a token's log-ratio is -clip_low: 0.4 is a ratio of 0.67."""
    clip_high: float = Field(default=0.4, gt=0)
    """Upper bound of a token's log-ratio is clip_high: 0.4 is a ratio of 1.49."""


class CispoConfig(PolicyChoice):
    """Clipped importance weights that leave every token its gradient (CISPO, arXiv 2506.13585):
    -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log p, where sg stops the gradient.

    For many updates per step, and for samples from older weights: rare tokens that start a new line
    of thought keep their gradient.
    """

    kind: Literal["cispo"] = "cispo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """Lower bound of the weight is 1 - clip_low. If left out: no lower bound, as in the paper,
    which tunes clip_high alone."""
    clip_high: float = Field(default=4.0, gt=0)
    """Upper bound of the weight is 1 + clip_high. The paper gives no number. arXiv 2510.13786
    compares bounds around 5, which is the bound of this default, and finds that results depend
    little on it."""


class DppoConfig(PolicyChoice):
    """Importance weights without a clip, -sg(min(ratio, upper)) * A * log p, where sg stops the
    gradient; but no gradient for tokens whose probability has changed by more than `threshold`, if
    it would move them further (DPPO, arXiv 2602.04879).

    For large vocabularies: a clip of ratios holds rare tokens back and lets likely ones move far.
    The paper measures the change from the engine's log-probs: `old_logprobs: rollout`.
    """

    kind: Literal["dppo"] = "dppo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    divergence: Literal["tv", "kl"] = "tv"
    """Measure of the change, with p and q the old and the new probability of the token: |p - q|
    (`tv`), or p * log(p / q) + (1 - p) * log((1 - p) / (1 - q)) (`kl`)."""
    threshold: float | None = Field(default=None, gt=0)
    """Upper bound of the change. If left out: 0.2 for `tv` and 0.05 for `kl`, as in the paper's
    larger runs."""
    upper: float | None = Field(default=5.0, gt=1)
    """Largest ratio that is a factor of the gradient; 5 in the paper's larger runs. null: no bound,
    as in its smaller ones."""

    @property
    def bound(self) -> float:
        """`threshold`, or the default of the divergence."""
        if self.threshold is not None:
            return self.threshold
        return 0.2 if self.divergence == "tv" else 0.05


class SapoConfig(PolicyChoice):
    """Smooth gate in place of a clip (SAPO, arXiv 2511.20347): -f(ratio) * A with f(x) =
    sigmoid(tau * (x - 1)) * 4 / tau.

    For training that a hard clip makes unstable, as with mixtures of experts. The paper averages
    over responses: `aggregation: sequence_mean`.
    """

    kind: Literal["sapo"] = "sapo"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    tau_pos: float = Field(default=1.0, gt=0)
    """Steepness tau of the gate where A > 0."""
    tau_neg: float = Field(default=1.05, gt=0)
    """Steepness tau of the gate where A <= 0. Larger than tau_pos, so that tokens of bad responses
    lose their gradient sooner."""


class ToprConfig(PolicyChoice):
    """Policy gradient without a ratio for good responses and with a truncated ratio for bad ones
    (TOPR, arXiv 2503.14286): -sg(w) * A * log p, w = 1 where A >= 0 and min(ratio of the response,
    1) elsewhere; sg stops the gradient.

    For samples from older weights or from another policy, failures included. The paper sums over a
    response: `aggregation: sequence_sum`.
    """

    kind: Literal["topr"] = "topr"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    positive_weight: float = Field(default=1.0, ge=0)
    """Factor where A >= 0; 1 in the paper."""
    negative_weight: float = Field(default=1.0, ge=0)
    """Factor where A < 0; 1 in the paper."""

    @model_validator(mode="after")
    def _trains(self) -> Self:
        """Refuse two weights of 0."""
        if self.positive_weight == 0 and self.negative_weight == 0:
            raise ValueError(
                "positive_weight and negative_weight are both 0, so nothing is trained"
            )
        return self


class SquaredRatioChoice(PolicyChoice):
    """Base of the losses that square a log-ratio."""

    level: Literal["token", "sequence"] = "sequence"
    """Log-ratio that is squared: that of the whole response (`sequence`) or that of each token
    (`token`)."""

    @property
    def couples_tokens(self) -> bool:
        """True if the squared log-ratio is that of the whole response."""
        return self.level == "sequence"


class KimiConfig(SquaredRatioChoice):
    """Mirror descent (Kimi k1.5, arXiv 2501.12599): -A * log p + tau / 2 * (log ratio)**2, with the
    log-ratio of the whole response to the policy that generated it.

    For several updates per step, with a penalty on the distance from the old policy in place of a
    clip. In the paper, A is the reward minus the mean of the group (`grpo` with `std: none`), and
    the loss is summed over a response: `aggregation: sequence_sum`.
    """

    kind: Literal["kimi"] = "kimi"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.RATIO})
    tau: float = Field(default=0.1, gt=0)
    """Strength of the penalty on the distance from the old policy. The paper gives no number."""


class DroConfig(SquaredRatioChoice):
    """Direct reward optimisation (DRO, arXiv 2405.19107): -A * log p + tau / 2 * (log p - log
    p_ref)**2, with the log-probs of the whole response.

    For one sample per prompt that was generated and rated by somebody else. The paper sums over a
    response: `aggregation: sequence_sum`.
    """

    kind: Literal["dro"] = "dro"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.REFERENCE})
    tau: float = Field(default=1.0, gt=0)
    """Strength of the penalty on the distance from the reference."""


class ClipCovConfig(PolicyChoice):
    """Clipped surrogate with a loss of 0 on a few tokens whose log-prob and advantage vary
    together, because these tokens cost the most entropy (Clip-Cov, arXiv 2505.22617). The tokens
    are drawn from those with cov_low < (log p - mean log p) * (A - mean A) < cov_high; means are
    over the trained tokens of the update.

    For runs whose entropy collapses and where an entropy bonus affects too many tokens.
    """

    kind: Literal["clip_cov"] = "clip_cov"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS})
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower bound of the ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper bound of the ratio is 1 + clip_high."""
    fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of the trained tokens of an update that lose their gradient; at least one token."""
    cov_low: float = 1.0
    """Lower bound of the covariance of the tokens that may lose their gradient."""
    cov_high: float = 5.0
    """Upper bound of the covariance of the tokens that may lose their gradient."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        """Require cov_low < cov_high."""
        if self.cov_low >= self.cov_high:
            raise ValueError(
                f"cov_low = {self.cov_low} is not below cov_high = {self.cov_high}, so no token "
                "lies between"
            )
        return self


class KlCovConfig(PolicyChoice):
    """Surrogate without a clip, -ratio * A, plus penalty * |log ratio| on a few tokens whose
    log-prob and advantage vary together most, because these tokens cost the most entropy (KL-Cov,
    arXiv 2505.22617): those with the largest (log p - mean log p) * (A - mean A); means are over
    the trained tokens of the update.

    For the same runs as `clip_cov`, with larger models: the penalty, in place of a loss of 0, kept
    the entropy more stable in the paper.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.OLD_LOGPROBS, Need.RATIO})
    fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of the trained tokens of an update that get the penalty, those of the highest
    covariance; at least one token. The paper uses 2e-3 for 7B and 2e-4 for 32B."""
    penalty: float = Field(default=1.0, gt=0)
    """Factor of the penalty, relative to the rest of the term."""


class NllConfig(LossChoice):
    """Negative log-likelihood, -log p, of the tokens of samples with a positive advantage: imitates
    successful samples (positive-example LM loss of VAPO, arXiv 2504.05118).

    For use beside a policy term, where successes are rare. The paper averages over the tokens of
    the successful samples only; here this term, like all terms, is averaged over every token of the
    update.
    """

    kind: Literal["nll"] = "nll"
    coef: float = Field(default=0.1, gt=0)
    """Factor of the term in the loss."""


class KlConfig(LossChoice):
    """Divergence from the reference model as a loss term, estimated from d = log p - log p_ref
    (http://joschu.net/blog/kl-approx.html): k1 = d, k2 = d**2 / 2, k3 = exp(-d) - 1 + d.

    For rewards that a policy can exploit, such as those of a reward model. Verifiable rewards
    mostly work without this term.
    """

    kind: Literal["kl"] = "kl"
    reads_advantages: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset({Need.REFERENCE})
    coef: float = Field(default=0.001, ge=0)
    """Factor of the term in the loss."""
    estimator: Literal["k1", "k2", "k3", "k3_k2grad"] = "k3"
    """Estimator of the divergence. k1: the log-ratio; its expected gradient is 0. k2: half the
    square of the log-ratio, with the gradient of KL(policy || reference). k3: never negative, with
    a bounded gradient, that of KL(reference || policy). k3_k2grad: the value of k3 with the
    gradient of k2."""


class EntropyConfig(LossChoice):
    """Entropy bonus: `coef` times the policy's entropy is subtracted from the loss (arXiv
    1602.01783).

    For policies that stop exploring. A large coefficient rewards noise.
    """

    kind: Literal["entropy"] = "entropy"
    reads_advantages: ClassVar[bool] = False
    reads_entropy: ClassVar[bool] = True
    coef: float = Field(ge=0)
    """Factor of the entropy, which is in nats."""


class DistillTermConfig(DistillTargetConfig, LossChoice):
    """Divergence from the teacher's distribution at every token of the policy's own samples
    (on-policy distillation, arXiv 2306.13649).

    For learning from a stronger model, alone or beside a reward. The advantage `distill` uses only
    the teacher's log-prob of the sampled token, which costs less and is noisier.
    """

    kind: Literal["distill"] = "distill"
    reads_advantages: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEACHER})
    coef: float = Field(default=1.0, gt=0)
    """Factor of the divergence, which is in nats."""
    divergence: DivergenceConfig = ReverseKlConfig()
    """Divergence between the teacher's distribution and the policy's."""


class OwnLossConfig(OwnPart, LossChoice):
    """Base of the loss terms that users bring; see `roll.algorithms.own.bases`."""

    sort: ClassVar[str] = "loss term"
    place: ClassVar[str] = "algorithm.loss"
    reads_entropy: ClassVar[bool] = True
    """True if the term uses the entropies of the policy's distributions, which are None without
    `algorithm.report_entropy` if no term uses them."""
    coef: float = Field(default=1.0, ge=0)
    """Factor of the term in the loss."""


class OwnPolicyLossConfig(OwnLossConfig, PolicyChoice):
    """Base of the terms that users bring and that estimate the policy gradient."""

    coef: float = Field(default=1.0, gt=0)
    """Factor of the term in the loss."""


LossTermConfig = Annotated[
    PgConfig
    | PpoClipConfig
    | GspoConfig
    | GmpoConfig
    | CispoConfig
    | DppoConfig
    | SapoConfig
    | ToprConfig
    | KimiConfig
    | DroConfig
    | ClipCovConfig
    | KlCovConfig
    | NllConfig
    | KlConfig
    | EntropyConfig
    | DistillTermConfig
    | PreferenceTermConfig
    | SpinConfig,
    Field(discriminator="kind"),
    OrOwn(OwnLossConfig, "roll.extend.LossTerm or roll.extend.PolicyLoss"),
]


class ValueLossConfig(Config):
    """Loss of the critic: 0.5 * max((v - R)**2, (clip(v, old - clip, old + clip) - R)**2) with the
    returns R (the value loss of PPO's code; arXiv 2005.12729)."""

    clip: float | None = Field(default=0.2, gt=0)
    """Largest distance of a value from the old value within a step, in units of the reward. null:
    no bound."""
