"""Scripts of letters: Latin, Cyrillic, Han and others."""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter

_SAME = {"CJK": "Han", "HIRAGANA": "Han", "KATAKANA": "Han", "KANGXI": "Han", "FULLWIDTH": "Latin"}
"""Japanese is written in several scripts; here they are one with Han."""
WITHOUT_SPACES = r"\u2e80-\u9fff\u0e00-\u0e7f"
"""Chinese, Japanese and Thai characters, which stand in sentences without spaces between words; for
the brackets of a pattern."""


@functools.lru_cache(maxsize=65536)
def script_of(char: str) -> str | None:
    """Return the script of a letter, such as `Latin`, `Cyrillic`, `Han` (with kana), `Arabic`; None
    for a character that is no letter. Mathematical letters, as in formulas, are Latin or Greek."""
    if not char.isalpha():
        return None
    plain = unicodedata.normalize("NFKC", char)[:1]
    first = unicodedata.name(plain if plain.isalpha() else char, "UNKNOWN").split()[0]
    first = first.split("-")[0]
    return _SAME.get(first, first.capitalize())


def scripts_of(text: str) -> Counter[str]:
    """Return the number of letters of each script of a text."""
    # Texts have few different characters, so that each is looked at once.
    found: Counter[str] = Counter()
    for char, number in Counter(text).items():
        if script := script_of(char):
            found[script] += number
    return found
