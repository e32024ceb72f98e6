"""Further conditions for instructions that a policy can follow to the letter without meaning it.

Under reinforcement learning a model finds what a check forgot. These conditions are no part of
IFEval and hold only with `hardened: true`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence

from roll.rewards.instructions.checkers import (
    CONSTRAINED,
    has_no_forbidden_words,
)
from roll.rewards.languages import language_of
from roll.rewards.lookalikes import plain_letters

_COMMAS = re.compile(
    r"[,\u055d\u060c\u07f8\u1363\u1802\u1808\u3001\ufe10\ufe11\ufe50\ufe51\uff0c\uff64]"
)
_CONTENT = re.compile(r"[^\W_]")


def told_language(text: str, language: str = "en") -> bool:
    """Return whether the text has a language at all; one of digits and marks has none."""
    return language_of(text) is not None


def exactly_one_option(text: str) -> bool:
    """Return whether the text names one of the constrained answers, and not several."""
    return sum(option.casefold() in text.casefold() for option in CONSTRAINED) == 1


def different_placeholders(text: str, num_placeholders: int) -> bool:
    """Return whether so many different pairs of brackets hold a letter or digit."""
    found = {inner for inner in re.findall(r"\[([^\[\]\n]*)\]", text) if _CONTENT.search(inner)}
    return len(found) >= num_placeholders


def different_highlights(text: str, num_highlights: int) -> bool:
    """Return whether so many different highlighted pieces hold a letter or digit."""
    found = {p.strip() for p in re.findall(r"\*([^\n*]+)\*", text) if _CONTENT.search(p)}
    return len(found) >= num_highlights


def no_disguised_word(text: str, forbidden_words: Sequence[str]) -> bool:
    """Return whether the words do not occur in look-alike or invisible characters either."""
    return has_no_forbidden_words(plain_letters(text), forbidden_words)


def no_comma_of_any_script(text: str) -> bool:
    """Return whether the text has no comma of another script or width."""
    return not _COMMAS.search(text)


def really_different(text: str) -> bool:
    """Return whether the two responses differ in more than case, spaces and punctuation."""
    words = {
        " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", piece).casefold()))
        for piece in text.split("******")
    }
    return len(words - {""}) == 2


def title_of_letters(text: str) -> bool:
    """Return whether a title has a letter or digit."""
    return any(_CONTENT.search(inner) for inner in re.findall(r"<<([^<>\n]+)>>", text))


def json_of_content(text: str) -> bool:
    """Return whether the text has a JSON object or list, not only a number or a word."""
    return bool(re.search(r"[\[{]", text)) and bool(_CONTENT.search(text))


HARDENED: Mapping[str, Callable[..., bool]] = {
    "language:response_language": told_language,
    "change_case:english_capital": told_language,
    "change_case:english_lowercase": told_language,
    "detectable_format:constrained_response": exactly_one_option,
    "detectable_content:number_placeholders": different_placeholders,
    "detectable_format:number_highlighted_sections": different_highlights,
    "keywords:forbidden_words": no_disguised_word,
    "punctuation:no_comma": no_comma_of_any_script,
    "combination:two_responses": really_different,
    "detectable_format:title": title_of_letters,
    "detectable_format:json_format": json_of_content,
}
"""Further conditions by id of the instruction; they get the same arguments as the check."""
