"""Words that are no units because they change the number before them: 5 squared, 5 thirds."""

from __future__ import annotations

import re

_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety "
    "hundred thousand million billion trillion quadrillion quintillion google googol lakh crore "
    "dozen score gross myriad half quarter third fourth fifth sixth seventh eighth ninth tenth "
    "eleventh twelfth thirteenth fifteenth sixteenth twentieth hundredth thousandth millionth "
    "billionth once twice thrice double triple quadruple percent percentage pct"
)
_OPERATIONS = (
    "squared cubed factorial plus minus times multiplied divided by over mod modulo modulus "
    "choose root sqrt log ln lg exp sin cos tan sec csc cot cosh sinh tanh arcsin arccos "
    "arctan lim max det gcd lcm raised power prime primes primorial inverse reciprocal "
    "negative positive less more greater fewer than below above not or and but if when is are "
    "was has equals equal approximately about base binary octal decimal hexadecimal point to "
    "the of a an in on at for with without plusminus infinity degreesbelow as his this thus "
    "always sometimes unless besides minuses pluses alas across perhaps does gives equalsto "
    "yes series basis radius otherwise twos powers roots logs sines cosines tangents "
    "factorials opposite squares cubes multiples"
)
_NUMBER_WORD = re.compile(
    r"(?:(?:twen|thir|for|fif|six|seven|eigh|nine)ty-?)?"
    r"(?:(?:one|two|three|four|five|six|seven|eight|nine)s?|first|second|third|fourth|fifth|sixth|"
    r"seventh|eighth|ninth|sixes)s?|(?:twen|thir|for|fif|six|seven|eigh|nine)(?:ty|ties|tieths?)"
    r"|(?:ten|eleven|twel[vf]e?|(?:thir|four|fif|six|seven|eigh|nine)teen)(?:th)?e?s?"
    r"|(?:hundred|thousand|[a-z]*illion|[a-z]*illiard)(?:th)?s?|googol[a-z]*|[a-z]*plex(?:es)?"
)
"""Number words, recognised by their form. "second" matches, too, but the table of units is searched
before, and there it is a unit of time."""
COUNTABLE = frozenset({"squares", "cubes", "times", "roots", "primes", "multiples", "points"})
"""Words that name counted things if they stand alone behind a number ("5 squares"). In a longer
phrase they describe an operation."""
_STEMS = frozenset(_NUMBERS.split())
_DENIED = (
    frozenset(_OPERATIONS.split()) | _STEMS | frozenset(f"{word}s" for word in _STEMS)
    | {"halves", "sixes", "twenties", "thirties", "forties", "fifties", "nineties"}
)  # fmt: skip


def is_denied(word: str) -> bool:
    """Return whether a lower-case word is no unit: a number word, an operation or a function word.

    Examples: "5 thirds", "5 squared", "5 of". Words of `COUNTABLE` are denied, too, and so is
    "second": search the table of units first.
    """
    return (
        word in _DENIED
        or word.removesuffix("s") in _DENIED
        or _NUMBER_WORD.fullmatch(word) is not None
    )
