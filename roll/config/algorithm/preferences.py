"""Losses of preferences: a tagged union, one class per choice.

p is the log-prob of a response (summed over its tokens, or their mean), r = p - p of the reference,
d = r of the chosen response minus r of the rejected one, s the logistic function.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roll.config.base import Config


class PreferenceLoss(Config):
    """The base of all of them."""

    needs_reference: ClassVar[bool] = True
    paired: ClassVar[bool] = True
    """Whether it compares two responses to one prompt."""
    beta: float = Field(default=0.1, gt=0)
    """Inverse temperature: the larger, the closer to the reference the policy stays."""


class PairLoss(PreferenceLoss):
    """The base of those that compare two responses."""

    average_logprobs: bool = False
    """Mean over the tokens of a response instead of their sum."""
    sft_coef: float = Field(default=0.0, ge=0)
    """Adds this much of the negative log-likelihood of the chosen response, per token, every pair
    counting the same (arXiv 2404.19733)."""


class SigmoidConfig(PairLoss):
    """-log s(beta * d) (DPO, arXiv 2305.18290)."""

    kind: Literal["sigmoid"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of labels taken to be wrong: (1 - e) * loss(d) + e * loss(-d) (conservative DPO)."""


class RobustConfig(PairLoss):
    """((1 - e) * loss(d) - e * loss(-d)) / (1 - 2e) of the sigmoid loss, unbiased where a share e
    of the labels is wrong (arXiv 2403.00409)."""

    kind: Literal["robust"] = "robust"
    label_smoothing: float = Field(default=0.1, gt=0, lt=0.5)
    """Share e of wrong labels."""


class HingeConfig(PairLoss):
    """max(0, 1 - beta * d) (SLiC, arXiv 2309.06657)."""

    kind: Literal["hinge"] = "hinge"


class IpoConfig(PairLoss):
    """(d - 1 / (2 * beta))^2, over means of log-probs (arXiv 2310.12036)."""

    kind: Literal["ipo"] = "ipo"
    average_logprobs: bool = True
    """Sums make long responses count more."""


class SimpoConfig(PairLoss):
    """-log s(beta * (p chosen - p rejected) - gamma), over means of log-probs and without a
    reference (arXiv 2405.14734)."""

    kind: Literal["simpo"] = "simpo"
    needs_reference: ClassVar[bool] = False
    beta: float = Field(default=2.0, gt=0)
    """Factor of the difference."""
    gamma: float = Field(default=1.0, ge=0)
    """What the difference must exceed."""
    average_logprobs: bool = True


class OrpoConfig(PairLoss):
    """-beta * log s(log odds of the chosen response - those of the rejected one), over means of
    log-probs, odds = P / (1 - P), plus `sft_coef` (arXiv 2403.07691)."""

    kind: Literal["orpo"] = "orpo"
    needs_reference: ClassVar[bool] = False
    average_logprobs: Literal[True] = True
    sft_coef: float = Field(default=1.0, ge=0)


class KtoConfig(PreferenceLoss):
    """w * (1 - s(beta * (r - z))) of wanted responses, w * (1 - s(beta * (z - r))) of others, where
    z is the divergence from the reference, estimated on responses to other prompts (arXiv
    2402.01306). Takes labelled responses; a pair counts as one of each."""

    kind: Literal["kto"] = "kto"
    paired: ClassVar[bool] = False
    desirable_weight: float = Field(default=1.0, gt=0)
    undesirable_weight: float = Field(default=1.0, gt=0)


PreferenceLossConfig = Annotated[
    SigmoidConfig | RobustConfig | HingeConfig | IpoConfig | SimpoConfig | OrpoConfig | KtoConfig,
    Field(discriminator="kind"),
]


class BradleyTerryConfig(Config):
    """-log s(score chosen - score rejected - margin) (Bradley-Terry; margin: arXiv 2307.09288)."""

    center_coef: float = Field(default=0.0, ge=0)
    """Of (score chosen + score rejected)^2, which keeps scores around 0 (arXiv 2312.09244)."""
