"""The built-in rewards by name, and what happens before their first sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roll.core.registry import Registry
from roll.rewards.answers.crossthink import crossthink_reward
from roll.rewards.answers.multiple_choice import check_multiple_choice, multiple_choice_reward
from roll.rewards.answers.qa import check_qa, qa_reward
from roll.rewards.code.reward import check_code, code_reward
from roll.rewards.detection.reward import detection_reward
from roll.rewards.form.format import check_format, format_reward
from roll.rewards.form.hygiene import check_hygiene, hygiene_reward
from roll.rewards.form.length import check_length, length_reward
from roll.rewards.form.repetition import check_repetition, repetition_reward
from roll.rewards.instructions.reward import ifeval_reward, start_ifeval
from roll.rewards.math.reward import math_reward, start_checkers
from roll.rewards.text.bleu import bleu_reward
from roll.rewards.text.contains import check_contains, contains_reward
from roll.rewards.text.exact import exact_reward
from roll.rewards.text.json_schema import check_json, json_reward
from roll.rewards.text.limited import start_limited
from roll.rewards.text.number import check_number, number_reward
from roll.rewards.text.pattern import check_pattern, pattern_reward
from roll.rewards.text.rouge import check_rouge, rouge_reward
from roll.rewards.text.similarity import check_similarity, similarity_reward

REWARDS: Registry[Callable[..., Any]] = Registry("reward")
"""Built-in rewards by the name that `fn` of the config uses."""
REWARDS.register("bleu")(bleu_reward)
REWARDS.register("code")(code_reward)
REWARDS.register("contains")(contains_reward)
REWARDS.register("crossthink")(crossthink_reward)
REWARDS.register("detection")(detection_reward)
REWARDS.register("exact")(exact_reward)
REWARDS.register("format")(format_reward)
REWARDS.register("hygiene")(hygiene_reward)
REWARDS.register("ifeval")(ifeval_reward)
REWARDS.register("json")(json_reward)
REWARDS.register("length")(length_reward)
REWARDS.register("math")(math_reward)
REWARDS.register("multiple_choice")(multiple_choice_reward)
REWARDS.register("number")(number_reward)
REWARDS.register("pattern")(pattern_reward)
REWARDS.register("qa")(qa_reward)
REWARDS.register("repetition")(repetition_reward)
REWARDS.register("rouge")(rouge_reward)
REWARDS.register("similarity")(similarity_reward)

PREPARE: dict[str, Callable[[], None]] = {
    "ifeval": start_ifeval,
    "json": start_limited,
    "math": start_checkers,
    "pattern": start_limited,
}
"""Functions that prepare a built-in reward, by its name. Each is called once before the first
sample and may take seconds."""

CHECKS: dict[str, Callable[..., None]] = {
    "code": check_code,
    "contains": check_contains,
    "format": check_format,
    "hygiene": check_hygiene,
    "json": check_json,
    "length": check_length,
    "multiple_choice": check_multiple_choice,
    "number": check_number,
    "pattern": check_pattern,
    "qa": check_qa,
    "repetition": check_repetition,
    "rouge": check_rouge,
    "similarity": check_similarity,
}
"""Functions that get the `kwargs` of a built-in reward, by its name, once their types are checked.
They raise ConfigError if the arguments do not fit together or need a package that is missing."""
