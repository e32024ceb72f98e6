"""The `length` reward, a penalty for responses that are too short or too long."""

from __future__ import annotations

from typing import Literal

from roll.core.errors import ConfigError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.instructions.words import count_words
from roll.rewards.thinking import final_text


def length_reward(
    sample: Sample,
    *,
    shortest: int = 0,
    longest: int | None = None,
    slope: int = 1,
    unit: Literal["tokens", "words", "final_words"] = "tokens",
    truncated: bool = False,
) -> Reward:
    """Return 0 for a length within a band; outside, a number that falls to -1 over `slope` units.

    Add it to any other reward of the same tags; `weight` says how much it counts. The soft overlong
    penalty of DAPO (arXiv:2503.14476) for 20,480 tokens with a buffer of 4,096 is
    `{longest: 16384, slope: 4096}`.

    Args:
        sample: sample to score.
        shortest: smallest length without penalty.
        longest: largest length without penalty; none if left out.
        slope: number of units outside of the band at which the penalty is full.
        unit: `tokens` or `words` of the whole response, or `final_words`, those after the thoughts.
            A thought that does not end has no final words.
        truncated: True gives -1 to a response that was cut at its token limit.

    Parts: `units`, the length; `outside`, how many units it lies outside of the band.
    """
    if unit == "tokens":
        length = sample.num_response_tokens
    elif unit == "words":
        length = count_words(sample.response_text)
    else:
        length = count_words(final_text(sample.response_text, prompt=sample.prompt.text) or "")
    outside = max(0, shortest - length, length - longest if longest is not None else 0)
    score = max(-1.0, 0.0 - outside / slope)
    if truncated and sample.truncated:
        score = -1.0
    return Reward(score, {"units": float(length), "outside": float(outside)})


def check_length(
    shortest: int = 0,
    longest: int | None = None,
    slope: int = 1,
    truncated: bool = False,
    **_: object,
) -> None:
    """Raise ConfigError if the band is empty or asks for nothing, or if `slope` is below 1."""
    if shortest <= 0 and longest is None and not truncated:
        raise ConfigError("give at least one of shortest, longest and truncated")
    if shortest < 0 or (longest is not None and longest < shortest):
        raise ConfigError(
            f"shortest is {shortest} and longest {longest}; expected 0 <= shortest <= longest"
        )
    if slope < 1:
        raise ConfigError(f"slope is {slope}; expected at least 1")
