"""The built-in rewards by name, and what happens before their first sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roll.core.registry import Registry
from roll.rewards.answers.crossthink import crossthink_reward
from roll.rewards.answers.multiple_choice import check_multiple_choice, multiple_choice_reward
from roll.rewards.answers.qa import check_qa, qa_reward
from roll.rewards.form.format import check_format, format_reward
from roll.rewards.form.length import check_length, length_reward
from roll.rewards.form.repetition import check_repetition, repetition_reward
from roll.rewards.instructions.reward import ifeval_reward, start_ifeval
from roll.rewards.math.reward import math_reward, start_checkers
from roll.rewards.text import exact_reward

REWARDS: Registry[Callable[..., Any]] = Registry("reward")
"""Built-in rewards by the name that `fn` of the config uses."""
REWARDS.register("crossthink")(crossthink_reward)
REWARDS.register("exact")(exact_reward)
REWARDS.register("format")(format_reward)
REWARDS.register("ifeval")(ifeval_reward)
REWARDS.register("length")(length_reward)
REWARDS.register("math")(math_reward)
REWARDS.register("multiple_choice")(multiple_choice_reward)
REWARDS.register("qa")(qa_reward)
REWARDS.register("repetition")(repetition_reward)

PREPARE: dict[str, Callable[[], None]] = {"ifeval": start_ifeval, "math": start_checkers}
"""Functions that prepare a built-in reward, by its name. Each is called once before the first
sample and may take seconds."""

CHECKS: dict[str, Callable[..., None]] = {
    "format": check_format,
    "length": check_length,
    "multiple_choice": check_multiple_choice,
    "qa": check_qa,
    "repetition": check_repetition,
}
"""Functions that get the `kwargs` of a built-in reward, by its name, once their types are checked.
They raise ConfigError if the arguments do not fit together or need a package that is missing."""
