"""Preference losses: a tagged union, one class per choice.

Symbols: p is the log-prob of a response (the sum over its tokens, or their mean); r is p minus the
reference's p; d is r of the chosen response minus r of the rejected one; s is the logistic
function.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roll.config.base import Config


class PreferenceLoss(Config):
    """Base of all preference losses."""

    needs_reference: ClassVar[bool] = True
    paired: ClassVar[bool] = True
    """True if the loss compares two responses to one prompt."""
    beta: float = Field(default=0.1, gt=0)
    """Inverse temperature: a larger value keeps the policy closer to the reference."""


class PairLoss(PreferenceLoss):
    """Base of the losses that compare two responses."""

    average_logprobs: bool = False
    """Use the mean log-prob over the tokens of a response instead of the sum."""
    sft_coef: float = Field(default=0.0, ge=0)
    """Factor of an added negative log-likelihood of the chosen response, per token; every pair
    counts the same (arXiv 2404.19733)."""


class SigmoidConfig(PairLoss):
    """Sigmoid loss, -log s(beta * d) (DPO, arXiv 2305.18290)."""

    kind: Literal["sigmoid"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share e of labels that are assumed to be wrong: (1 - e) * loss(d) + e * loss(-d)
    (conservative DPO)."""


class RobustConfig(PairLoss):
    """Sigmoid loss corrected for wrong labels: ((1 - e) * loss(d) - e * loss(-d)) / (1 - 2e),
    unbiased if a share e of the labels is wrong (arXiv 2403.00409)."""

    kind: Literal["robust"] = "robust"
    label_smoothing: float = Field(default=0.1, gt=0, lt=0.5)
    """Share e of wrong labels."""


class HingeConfig(PairLoss):
    """Hinge loss, max(0, 1 - beta * d) (SLiC, arXiv 2309.06657)."""

    kind: Literal["hinge"] = "hinge"


class IpoConfig(PairLoss):
    """Squared loss, (d - 1 / (2 * beta))^2, over mean log-probs (IPO, arXiv 2310.12036)."""

    kind: Literal["ipo"] = "ipo"
    average_logprobs: bool = True
    """Use the mean log-prob over the tokens of a response. With sums, long responses would count
    more."""


class SimpoConfig(PairLoss):
    """Loss with a margin and without a reference, -log s(beta * (p chosen - p rejected) - gamma),
    over mean log-probs (SimPO, arXiv 2405.14734)."""

    kind: Literal["simpo"] = "simpo"
    needs_reference: ClassVar[bool] = False
    beta: float = Field(default=2.0, gt=0)
    """Factor of the difference between the log-probs."""
    gamma: float = Field(default=1.0, ge=0)
    """Margin that the difference, times beta, should exceed."""
    average_logprobs: bool = True


class OrpoConfig(PairLoss):
    """Odds-ratio loss, -beta * log s(log odds of the chosen response - log odds of the rejected
    one), over mean log-probs, with odds = P / (1 - P), plus `sft_coef` (ORPO, arXiv 2403.07691)."""

    kind: Literal["orpo"] = "orpo"
    needs_reference: ClassVar[bool] = False
    average_logprobs: Literal[True] = True
    sft_coef: float = Field(default=1.0, ge=0)


class KtoConfig(PreferenceLoss):
    """Loss of single labelled responses: w * (1 - s(beta * (r - z))) for wanted responses and w *
    (1 - s(beta * (z - r))) for unwanted ones. z is the divergence from the reference, estimated on
    responses to other prompts (KTO, arXiv 2402.01306). A pair counts as one wanted and one unwanted
    response."""

    kind: Literal["kto"] = "kto"
    paired: ClassVar[bool] = False
    desirable_weight: float = Field(default=1.0, gt=0)
    """Factor w of wanted responses."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Factor w of unwanted responses."""


PreferenceLossConfig = Annotated[
    SigmoidConfig | RobustConfig | HingeConfig | IpoConfig | SimpoConfig | OrpoConfig | KtoConfig,
    Field(discriminator="kind"),
]


class BradleyTerryConfig(Config):
    """Loss of a reward model on pairs: -log s(score chosen - score rejected - margin)
    (Bradley-Terry; margin: arXiv 2307.09288)."""

    center_coef: float = Field(default=0.0, ge=0)
    """Factor of an added (score chosen + score rejected)^2, which keeps scores near 0 (arXiv
    2312.09244)."""
