"""What the policy is trained on: one file per list of choices, put together here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from roll.config.algorithm.advantages import (
    AdvantageConfig,
    DistillConfig,
    GaeConfig,
    GdpoConfig,
    GrpoConfig,
    OpoConfig,
    PassKConfig,
    ReinforceConfig,
    ReinforcePpConfig,
    RemaxConfig,
    RlooConfig,
)
from roll.config.algorithm.aggregation import Aggregation
from roll.config.algorithm.correction import CorrectionConfig, RejectConfig, WeightConfig
from roll.config.algorithm.losses import (
    CispoConfig,
    ClipCovConfig,
    DistillTermConfig,
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
    "DroConfig",
    "EntropyConfig",
    "GaeConfig",
    "GdpoConfig",
    "GmpoConfig",
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
    "OverlongMaskConfig",
    "OverlongPenaltyConfig",
    "PassKConfig",
    "PgConfig",
    "PpoClipConfig",
    "ReinforceConfig",
    "ReinforcePpConfig",
    "RejectConfig",
    "RemaxConfig",
    "RewardShapingConfig",
    "RlooConfig",
    "SampleWeightConfig",
    "SapoConfig",
    "ScaleRewardConfig",
    "ToprConfig",
    "ValueLossConfig",
    "WeightConfig",
    "WhitenAdvantageConfig",
]


class AlgorithmConfig(Config):
    """What the policy is trained on: advantage, a sum of loss terms, and their aggregation."""

    preset: str | None = None
    """An algorithm by its name; `roll show` prints what it stands for. Whatever else the same file
    sets wins over it; of its parts it drops what files named in `defaults` say, and on the command
    line what all files say."""
    advantage: AdvantageConfig = GrpoConfig()
    loss: tuple[LossTermConfig, ...] = Field(default=(PpoClipConfig(),), min_length=1)
    """Terms that are added up, each with its coefficient."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    """The policy's log-probs before the first update of a step, the denominator of ratios. `auto`
    skips the trainer's extra forward pass where a step is one update, since the update's own
    forward pass gives the same numbers. `rollout` takes those that the engine reported: no extra
    pass, and the ratio itself corrects for the gap between engine and trainer."""
    correction: CorrectionConfig | None = None
    """Importance weights and rejection for the gap between the engine's log-probs and the
    trainer's; needs the trainer's own, in a forward pass before the update."""
    aggregation_tokens: int | None = Field(default=None, ge=1)
    """Divisor of `constant` aggregation, and of no other; left out: sampling.max_new_tokens."""
    reward_shaping: tuple[RewardShapingConfig, ...] = ()
    """Changes to the total reward of each sample, in this order, before the advantages."""
    masks: tuple[MaskConfig, ...] = ()
    """Samples that are generated and rewarded but not trained on; a sample needs to pass all."""
    sample_weights: tuple[SampleWeightConfig, ...] = ()
    """How much a sample counts in the loss; several multiply. Only their ratios matter: the token
    weights of an update add up to what they would without."""
    advantage_shaping: tuple[AdvantageShapingConfig, ...] = ()
    """Changes to the advantages, in this order; returns stay as they are."""
    kl_in_reward: KlInRewardConfig | None = None
    """Divergence from the reference as a penalty on every token, instead of a `kl` loss term."""

    @model_validator(mode="after")
    def _each_term_once(self) -> AlgorithmConfig:
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
        whole = [term.kind for term in self.loss if term.whole_sequences]
        if weight is not None and weight.level in ("token", "turn") and whole:
            raise ValueError(
                f"correction.weight.level: {weight.level} weights differ within a sample, and "
                f"{whole[0]} gives a sample one ratio and one loss; use sequence or geometric"
            )
        return self

    @model_validator(mode="after")
    def _taught_once(self) -> AlgorithmConfig:
        if self.distill_target is not None and self.advantage.kind == "distill":
            raise ValueError(
                "advantage.kind: distill and a distill loss term are two estimates of one "
                "gradient, and their sum is a step twice as long; keep one"
            )
        return self

    @property
    def distill_target(self) -> DistillTermConfig | None:
        """What teachers are asked beyond log-probs, if anything."""
        return next((term for term in self.loss if isinstance(term, DistillTermConfig)), None)

    @property
    def needs(self) -> dict[Need, list[str]]:
        """What the choices ask of the rest of the run, and which of them ask it."""
        found: dict[Need, list[str]] = {}
        for choice in (self.advantage, *self.loss, *self.reward_shaping):
            for need in sorted(choice.all_needs):
                found.setdefault(need, []).append(choice.kind)
        if self.correction is not None:
            found.setdefault(Need.OLD_LOGPROBS, []).append("correction")
        if self.kl_in_reward is not None:
            found.setdefault(Need.REFERENCE, []).append("kl_in_reward")
        return found
