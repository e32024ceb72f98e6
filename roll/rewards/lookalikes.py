"""Characters that look like Latin letters, and characters that are not seen.

A policy can write a word so that a reader sees it and a comparison does not: in Cyrillic or Greek
letters, in full width, in mathematical letters, or with invisible characters inside.
"""

from __future__ import annotations

import unicodedata

_TWINS = {
    "a": "\u0430\u03b1\u0251",
    "b": "\u042c\u0412\u03b2\u0392\u0432",
    "c": "\u0441\u03f2",
    "d": "\u0501",
    "e": "\u0435\u03b5\u0395\u0415",
    "g": "\u0261",
    "h": "\u04bb\u041d\u0397\u043d",
    "i": "\u0456\u03b9\u0131\u0399\u0406",
    "j": "\u0458\u0408",
    "k": "\u043a\u03ba\u039a\u041a",
    "l": "\u04cf",
    "m": "\u043c\u041c\u039c",
    "n": "\u043f\u03b7\u039d",
    "o": "\u043e\u03bf\u03c3\u039f\u041e",
    "p": "\u0440\u03c1\u03a1\u0420",
    "q": "\u051b",
    "r": "\u0433",
    "s": "\u0455\u0405",
    "t": "\u0442\u03c4\u03a4\u0422",
    "u": "\u03c5\u057d",
    "v": "\u03bd\u0475",
    "w": "\u0461\u051d\u03c9",
    "x": "\u0445\u03c7\u03a7\u0425",
    "y": "\u0443\u03b3\u03a5\u0423",
    "z": "\u0396Z",
}
_PLAIN = {ord(twin): letter for letter, twins in _TWINS.items() for twin in twins}


def plain_letters(text: str) -> str:
    """Return a text in compatible form (NFKC), without invisible characters and accents, with Latin
    letters for Cyrillic and Greek letters that look like them.

    Only for comparisons with Latin words: Russian or Greek text becomes nonsense.
    """
    # Invisible: controls of direction and joining, variation selectors, accents (after NFKD).
    decomposed = unicodedata.normalize("NFKD", text)
    seen = "".join(c for c in decomposed if unicodedata.category(c) not in ("Cf", "Mn", "Me"))
    return seen.translate(_PLAIN)
