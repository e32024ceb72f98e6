"""Every config class of `algorithm:` has the part that is registered for it, and no other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

import pytest

from roll.algorithms.registries import ADVANTAGES, LOSSES, PartRegistry
from roll.algorithms.shaping.interface import (
    ADVANTAGE_SHAPINGS,
    MASKS,
    REWARD_SHAPINGS,
    SAMPLE_WEIGHTS,
)
from roll.config.algorithm import (
    AdvantageConfig,
    AdvantageShapingConfig,
    ClipAdvantageConfig,
    GaeConfig,
    GrpoConfig,
    LossTermConfig,
    MaskConfig,
    RewardShapingConfig,
    SampleWeightConfig,
)
from roll.config.base import Config

REGISTRIES: dict[str, tuple[PartRegistry[Any], Any]] = {
    "advantage": (ADVANTAGES, AdvantageConfig),
    "loss": (LOSSES, LossTermConfig),
    "reward_shaping": (REWARD_SHAPINGS, RewardShapingConfig),
    "masks": (MASKS, MaskConfig),
    "sample_weights": (SAMPLE_WEIGHTS, SampleWeightConfig),
    "advantage_shaping": (ADVANTAGE_SHAPINGS, AdvantageShapingConfig),
}


def choices(union: Any) -> tuple[type[Config], ...]:
    """The classes of a tagged union, which is annotated with its tag."""
    return get_args(get_args(union)[0])


@pytest.mark.parametrize("key", REGISTRIES)
def test_every_choice_has_a_part_and_every_part_can_be_chosen(key: str) -> None:
    registry, union = REGISTRIES[key]
    assert set(registry) == set(choices(union))


@pytest.mark.parametrize(
    ("key", "choice"),
    [(key, choice) for key, (_, union) in REGISTRIES.items() for choice in choices(union)],
)
def test_a_part_is_made_of_its_config_alone(key: str, choice: type[Config]) -> None:
    config = choice.model_construct()
    part = REGISTRIES[key][0].build(config)
    assert part.config is config
    assert get_type_hints(type(part))["config"] is choice
    assert [spec.name for spec in fields(part) if spec.init] == ["config"]


@dataclass(frozen=True)
class Part:
    config: Config


def test_a_class_is_registered_once_and_only_registered_ones_are_built() -> None:
    parts: PartRegistry[Part] = PartRegistry("sort of part")
    assert parts.register(GaeConfig)(Part) is Part
    assert parts.build(GaeConfig(gamma=0.5)) == Part(GaeConfig(gamma=0.5))
    assert list(parts) == [GaeConfig]
    with pytest.raises(ValueError, match="sort of part GaeConfig is registered twice"):
        parts.register(GaeConfig)(Part)
    with pytest.raises(TypeError, match="no sort of part is registered for GrpoConfig"):
        parts.build(GrpoConfig())
    with pytest.raises(TypeError, match="no mask is registered for ClipAdvantageConfig"):
        MASKS.build(ClipAdvantageConfig(limit=1.0))
