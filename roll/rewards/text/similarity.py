"""The `similarity` reward: edit distance to a reference text."""

from __future__ import annotations

from typing import Literal

from roll.core.errors import ConfigError
from roll.core.types import Sample
from roll.rewards.packages import optional_package
from roll.rewards.text.references import best_over

Unit = Literal["characters", "words"]


def similarity_reward(
    sample: Sample,
    *,
    unit: Unit = "characters",
    case: bool = True,
    at_least: float | None = None,
    references: str | None = None,
) -> float:
    """Return 1 - distance / length of the longer text, the best over all references, in 0..1.

    The distance is Levenshtein's: the least number of inserted, removed and replaced units. White
    space at the ends does not count.

    Args:
        sample: sample to score.
        unit: `characters` or `words` (divided at white space).
        case: False ignores case.
        at_least: if given, the score is 1 for a similarity of at least this, else 0.
        references: column with the reference texts; if left out, the answer of the row.

    Raises:
        DataError: the column is missing, is no list of texts or is empty.
    """

    def compare(text: str, right: str) -> float:
        return similarity(text, right, unit, case=case)

    found = best_over(sample, references, compare)
    return found if at_least is None else float(found >= at_least)


def similarity(text: str, reference: str, unit: Unit, *, case: bool = True) -> float:
    """Return the similarity of two texts in 0..1, see `similarity_reward`; 1 if both are empty."""
    if not case:
        text, reference = text.casefold(), reference.casefold()
    distance = optional_package("rapidfuzz.distance", "rapidfuzz", "edit distance is computed")
    sides = [each.split() if unit == "words" else each.strip() for each in (text, reference)]
    return float(distance.Levenshtein.normalized_similarity(*sides))


def check_similarity(at_least: float | None = None, **_: object) -> None:
    """Raise ConfigError if the threshold is no share, or the package rapidfuzz is missing."""
    if at_least is not None and not 0 < at_least <= 1:
        raise ConfigError(f"at_least is {at_least:g}; expected a number above 0, at most 1")
    similarity("", "", "characters")
