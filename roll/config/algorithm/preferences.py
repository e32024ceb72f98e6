"""Preference losses: a tagged union, one class per choice.

Symbols: p is the log-prob of a response (the sum over its tokens, or their mean); r is p minus the
reference's p; d is r of the chosen response minus r of the rejected one; s is the logistic
function.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from roll.config.algorithm.loss_choice import LossChoice
from roll.config.algorithm.needs import Need
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


PairFormulaConfig = Annotated[
    SigmoidConfig | RobustConfig | HingeConfig | IpoConfig | SimpoConfig | OrpoConfig,
    Field(discriminator="kind"),
]

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


class PreferenceTermConfig(LossChoice):
    """Loss of the pair that each prompt gives: its samples with the highest and the lowest reward
    (online DPO, arXiv 2402.04792; the best and the worst of several: arXiv 2405.07863). Other
    samples are not trained on, nor are prompts whose samples all have the same reward.

    For rewards that tell which response is better, but not by how much: judges and reward models.
    Every pair counts the same: `aggregation: sequence_mean`. An update has the pairs of as many
    prompts as `actor_train.samples_per_update` counts samples of.
    """

    kind: Literal["preference"] = "preference"
    reads_advantages: ClassVar[bool] = False
    trains_pairs: ClassVar[bool] = True
    compares_rewards: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.SIBLINGS})
    formula: PairFormulaConfig = SigmoidConfig()
    """Formula of the loss of a pair; all but `simpo` and `orpo` need a `reference` role."""

    @property
    def all_needs(self) -> frozenset[Need]:
        """`needs`, plus a reference if the formula compares with one."""
        return self.needs | ({Need.REFERENCE} if self.formula.needs_reference else frozenset())


class SpinConfig(LossChoice):
    """Loss of the pair of the data set's answer and a response of the policy itself: -log s(beta *
    d), with s the logistic function, and d = r of the answer minus r of the response, where r is
    the log-prob of all tokens, minus that before the step (SPIN, self-play fine-tuning, arXiv
    2401.01335). The policy before the step is the opponent of the paper: it wrote the response, and
    is the reference. So a step is an iteration of the paper, and should be large, and have several
    updates.

    For data with good answers, and without rewards, where supervised fine-tuning has stopped to
    help. The answer is the text of the column `columns.answer` of a source, with the end mark of
    the chat template behind it; one longer than `sampling.max_new_tokens` is cut there, as a
    response is. Every pair counts the same: `aggregation: sequence_mean`.
    """

    kind: Literal["spin"] = "spin"
    reads_advantages: ClassVar[bool] = False
    trains_pairs: ClassVar[bool] = True
    trains_answers: ClassVar[bool] = True
    beta: float = Field(default=0.1, gt=0)
    """Factor of d, `lambda` of the paper, which takes 0.1, and 5 in its last iteration: a larger
    value keeps the policy closer to that before the step."""
