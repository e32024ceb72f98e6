"""The `algorithm` section of a run file: its lists of choices, one file per list."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from roll.config.algorithm.advantages import (
    AdvantageConfig,
    DistillConfig,
    GaeConfig,
    GdpoConfig,
    GigpoConfig,
    GpgConfig,
    GrpoConfig,
    OpoConfig,
    OtbConfig,
    PassKConfig,
    PrimeConfig,
    ReinforceConfig,
    ReinforcePpConfig,
    RemaxConfig,
    RlooConfig,
    TurnGaeConfig,
    WinRateConfig,
)
from roll.config.algorithm.aggregation import Aggregation
from roll.config.algorithm.correction import CorrectionConfig, RejectConfig, WeightConfig
from roll.config.algorithm.losses import (
    CispoConfig,
    ClipCovConfig,
    DistillTermConfig,
    DppoConfig,
    DroConfig,
    EntropyConfig,
    GmpoConfig,
    GspoConfig,
    KimiConfig,
    KlConfig,
    KlCovConfig,
    LossTermConfig,
    NllConfig,
    PgConfig,
    PpoClipConfig,
    SapoConfig,
    ToprConfig,
    ValueLossConfig,
)
from roll.config.algorithm.needs import Need
from roll.config.algorithm.preferences import PreferenceTermConfig, SpinConfig
from roll.config.algorithm.shaping import (
    AdvantageShapingConfig,
    ClipAdvantageConfig,
    ClipRewardConfig,
    DifficultyMaskConfig,
    DifficultyWeightConfig,
    KlInRewardConfig,
    LengthPenaltyConfig,
    LengthWeightConfig,
    MaskConfig,
    NormalizeRewardConfig,
    OverlongMaskConfig,
    OverlongPenaltyConfig,
    RewardShapingConfig,
    SampleWeightConfig,
    ScaleRewardConfig,
    SpreadMaskConfig,
    WhitenAdvantageConfig,
)
from roll.config.base import Config

__all__ = [
    "AdvantageConfig",
    "AdvantageShapingConfig",
    "Aggregation",
    "AlgorithmConfig",
    "CispoConfig",
    "ClipAdvantageConfig",
    "ClipCovConfig",
    "ClipRewardConfig",
    "CorrectionConfig",
    "DifficultyMaskConfig",
    "DifficultyWeightConfig",
    "DistillConfig",
    "DistillTermConfig",
    "DppoConfig",
    "DroConfig",
    "EntropyConfig",
    "GaeConfig",
    "GdpoConfig",
    "GigpoConfig",
    "GmpoConfig",
    "GpgConfig",
    "GrpoConfig",
    "GspoConfig",
    "KimiConfig",
    "KlConfig",
    "KlCovConfig",
    "KlInRewardConfig",
    "LengthPenaltyConfig",
    "LengthWeightConfig",
    "LossTermConfig",
    "MaskConfig",
    "Need",
    "NllConfig",
    "NormalizeRewardConfig",
    "OpoConfig",
    "OtbConfig",
    "OverlongMaskConfig",
    "OverlongPenaltyConfig",
    "PassKConfig",
    "PgConfig",
    "PpoClipConfig",
    "PreferenceTermConfig",
    "PrimeConfig",
    "ReinforceConfig",
    "ReinforcePpConfig",
    "RejectConfig",
    "RemaxConfig",
    "RewardShapingConfig",
    "RlooConfig",
    "SampleWeightConfig",
    "SapoConfig",
    "ScaleRewardConfig",
    "SpinConfig",
    "SpreadMaskConfig",
    "ToprConfig",
    "TurnGaeConfig",
    "ValueLossConfig",
    "WeightConfig",
    "WhitenAdvantageConfig",
    "WinRateConfig",
]


class AlgorithmConfig(Config):
    """The training algorithm: advantage, loss terms, aggregation, and optional changes to rewards,
    samples and advantages."""

    preset: str | None = None
    """Name of a preset, for example `grpo`; `roll show` prints the settings that it stands for.
    Settings in the same file win over the preset. The preset replaces what files named in
    `defaults` say about the parts it sets; a preset named on the command line replaces what all
    files say about them."""
    advantage: AdvantageConfig = GrpoConfig()
    """Estimator that turns rewards into one advantage per token."""
    loss: tuple[LossTermConfig, ...] = Field(default=(PpoClipConfig(),), min_length=1)
    """Loss terms; the loss is their sum, each times its coefficient."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    """Source of the old log-probs, which are the policy's log-probs before the first update of a
    step and the denominator of ratios. `recompute`: the trainer computes them in an extra forward
    pass. `auto`: as `recompute`, but without the extra pass where a step is one update, because the
    forward pass of that update gives the same numbers. `rollout`: the log-probs that the engine
    reported; this needs no extra pass, and the ratio itself corrects for the gap between engine and
    trainer."""
    correction: CorrectionConfig | None = None
    """Importance weights and rejection, which correct for the gap between the engine's log-probs
    and the trainer's. Needs the trainer's log-probs from a forward pass before the update. null: no
    correction."""
    aggregation_tokens: int | None = Field(default=None, ge=1)
    """Divisor of the `constant` aggregation, in tokens; only for that aggregation. If left out:
    sampling.max_new_tokens; of episodes data.max_episode_tokens."""
    reward_shaping: tuple[RewardShapingConfig, ...] = ()
    """Changes to the total reward of each sample, applied in this order before the advantages are
    computed."""
    masks: tuple[MaskConfig, ...] = ()
    """Rules that exclude samples from training after they were generated and rewarded. A sample is
    trained on if it passes all rules."""
    sample_weights: tuple[SampleWeightConfig, ...] = ()
    """Weights of samples in the loss; several weights multiply. Only the ratios between weights
    matter: the token weights of an update are rescaled so that their sum stays the same."""
    advantage_shaping: tuple[AdvantageShapingConfig, ...] = ()
    """Changes to the advantages, applied in this order. Returns stay as they are."""
    kl_in_reward: KlInRewardConfig | None = None
    """Divergence from the reference as a penalty on the reward of every token, in place of a `kl`
    loss term. null: no penalty."""
    report_entropy: bool = True
    """Compute the entropy of the policy at every trained token, and report its mean (`entropy`). It
    costs some passes over the logits of each update, and `roll report` cannot see that a policy
    stops exploring without it. Terms that use entropies have them in any case."""

    @model_validator(mode="after")
    def _each_term_once(self) -> AlgorithmConfig:
        """Refuse a loss term listed twice, and more than one term that estimates the policy
        gradient."""
        kinds = [term.kind for term in self.loss]
        twice = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if twice:
            raise ValueError(f"loss: terms listed twice: {', '.join(twice)}")
        policy = [term.kind for term in self.loss if term.estimates_policy_gradient]
        if len(policy) > 1:
            raise ValueError(
                f"loss: {' and '.join(policy)} each estimate the policy gradient, and their sum is "
                "no algorithm; keep one"
            )
        return self

    @model_validator(mode="after")
    def _corrected_once(self) -> AlgorithmConfig:
        """Refuse a correction with `old_logprobs: rollout`, and token or turn weights with a loss
        of whole sequences."""
        if self.correction is None:
            return self
        if self.old_logprobs == "rollout":
            raise ValueError(
                "correction: compares the engine's log-probs with the trainer's, and "
                "old_logprobs=rollout takes the engine's as the trainer's, so every ratio would be "
                "1; drop the correction (the loss's own ratio corrects already) or use "
                "old_logprobs=auto"
            )
        weight = self.correction.weight
        whole = [term.kind for term in self.loss if term.couples_tokens]
        if weight is not None and weight.level in ("token", "turn") and whole:
            raise ValueError(
                f"correction.weight.level: {weight.level} weights differ within a sample, and "
                f"{whole[0]} gives a sample one ratio and one loss; use sequence or geometric"
            )
        return self

    @model_validator(mode="after")
    def _taught_once(self) -> AlgorithmConfig:
        """Refuse the advantage `distill` beside a `distill` loss term."""
        if self.distill_target is not None and self.advantage.kind == "distill":
            raise ValueError(
                "advantage.kind: distill and a distill loss term are two estimates of one "
                "gradient, and their sum is a step twice as long; keep one"
            )
        return self

    @model_validator(mode="after")
    def _pairs_alone(self) -> AlgorithmConfig:
        """Refuse what trains on more than the pairs of a term that compares two samples, or counts
        pairs unequally."""
        pairs = [term.kind for term in self.loss if term.trains_pairs]
        if not pairs:
            return self
        if len(pairs) > 1:
            raise ValueError(
                f"loss: {' and '.join(pairs)} train on pairs of different responses; keep one"
            )
        others = [term.kind for term in self.loss if term.reads_advantages]
        if others:
            raise ValueError(
                f"loss: {pairs[0]} trains on two responses to a prompt, and {' and '.join(others)} "
                "on the advantages of all; keep one or the other"
            )
        if self.aggregation is not Aggregation.SEQUENCE_MEAN:
            raise ValueError(
                f"aggregation: {self.aggregation} makes pairs of long responses count more, and "
                f"{pairs[0]} is a mean over pairs; use sequence_mean"
            )
        if self.correction is not None:
            raise ValueError(
                f"correction: corrects the loss of single tokens, and {pairs[0]} has one loss for "
                "two responses; drop the correction"
            )
        return self

    @model_validator(mode="after")
    def _weighs_something(self) -> AlgorithmConfig:
        """Refuse importance weights without a term that they multiply."""
        weighed = any(term.estimates_policy_gradient for term in self.loss)
        if self.correction is not None and self.correction.weight is not None and not weighed:
            terms = ", ".join(term.kind for term in self.loss)
            raise ValueError(
                "correction.weight: weights multiply the term that estimates the policy gradient, "
                f"and none of {terms} does; drop the weight"
            )
        return self

    @property
    def trains_pairs(self) -> bool:
        """True if pairs of two responses to a prompt are trained on."""
        return any(term.trains_pairs for term in self.loss)

    @property
    def trains_answers(self) -> bool:
        """True if one response of each pair is the answer of the data set."""
        return any(term.trains_answers for term in self.loss)

    @property
    def distill_target(self) -> DistillTermConfig | None:
        """The `distill` loss term, which tells what teachers compute besides log-probs; None if
        there is no such term."""
        return next((term for term in self.loss if isinstance(term, DistillTermConfig)), None)

    @property
    def needs(self) -> dict[Need, list[str]]:
        """Requirements of the chosen parts on the rest of the config, each with the `kind` of every
        part that has the requirement."""
        found: dict[Need, list[str]] = {}
        samples = (*self.reward_shaping, *self.masks, *self.sample_weights)
        for choice in (self.advantage, *self.loss, *samples, *self.advantage_shaping):
            for need in sorted(choice.all_needs):
                found.setdefault(need, []).append(choice.kind)
        if self.correction is not None:
            found.setdefault(Need.OLD_LOGPROBS, []).append("correction")
        if self.kl_in_reward is not None:
            found.setdefault(Need.REFERENCE, []).append("kl_in_reward")
        return found
