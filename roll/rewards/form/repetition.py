"""The `repetition` reward, a penalty for text that repeats itself."""

from __future__ import annotations

import itertools
import re
import zlib
from typing import Literal

from roll.core.errors import ConfigError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.form.scripts import WITHOUT_SPACES
from roll.rewards.thinking import final_text

_ALONE = rf"{WITHOUT_SPACES}\uac00-\ud7af"
_UNIT = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+")
MIN_CHARS = 200
"""Shortest text whose compression is judged, in characters; short texts say little."""


def repetition_reward(
    sample: Sample,
    *,
    kind: Literal["ngram", "compression"] = "ngram",
    n: int = 4,
    free: float = 0.2,
    floor: float = 0.2,
    text: Literal["all", "final"] = "all",
) -> Reward:
    """Return a number from -1, for a text that only repeats itself, to 0, for one that does not.

    Add it to any other reward of the same tags; `weight` says how much it counts.

    `ngram` takes the share of n-grams that occurred before, 1 - distinct / all, and grows in
    proportion from 0 at the share `free` to -1 at the share 1. An n-gram is n words in a row, in
    any case; a Chinese, Japanese, Korean or Thai character is a word.

    `compression` takes the length of the text in UTF-8 after zlib divided by that before. It grows
    from 0 at the ratio `floor` to -1 at the ratio 0. Prose has ratios of 0.3 to 0.6. Texts below
    200 characters are not judged.

    Args:
        sample: sample to score.
        kind: `ngram` or `compression`, see above.
        n: number of words of an n-gram.
        free: share of repeated n-grams without penalty.
        floor: ratio of compression below which the penalty begins.
        text: `all`: the response with its thoughts; `final`: the text after the thoughts.

    Parts: `share` of repeated n-grams, or `ratio` of compression.
    """
    judged: str | None = sample.response_text
    if text == "final":
        judged = final_text(sample.response_text, prompt=sample.prompt.text)
    if kind == "ngram":
        share = repeated_share(judged or "", n)
        return Reward(min(0.0, free - share) / (1 - free), {"share": share})
    ratio = compression_ratio(judged or "")
    return Reward(min(0.0, ratio / floor - 1), {"ratio": ratio})


def repeated_share(text: str, n: int) -> float:
    """Return the share of n-grams that occurred before; 0 for texts of fewer than n words."""
    words = _UNIT.findall(text.lower())
    grams = zip(*(itertools.islice(words, start, None) for start in range(n)), strict=False)
    number = max(0, len(words) - n + 1)
    return 1 - len({hash(gram) for gram in grams}) / number if number else 0.0


def compression_ratio(text: str) -> float:
    """Return the compressed length divided by the length, at most 1; 1 for texts that are short."""
    raw = text.encode("utf-8", "replace")
    return min(1.0, len(zlib.compress(raw, 6)) / len(raw)) if len(text) >= MIN_CHARS else 1.0


def check_repetition(n: int = 4, free: float = 0.2, floor: float = 0.2, **_: object) -> None:
    """Raise ConfigError if a number is out of its range."""
    if not 1 <= n <= 100:
        raise ConfigError(f"n is {n}; expected 1 to 100")
    if not 0 <= free < 1:
        raise ConfigError(f"free is {free:g}; expected a share from 0 to below 1")
    if not 0 < floor <= 1:
        raise ConfigError(f"floor is {floor:g}; expected a ratio above 0, at most 1")
