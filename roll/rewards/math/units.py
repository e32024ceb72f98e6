"""Units behind a number: recognition and comparison.

A word is a unit if it is in the table, or if it is a plural noun, which names counted things ("5
apples"). A word that changes the number ("5 squared", "5 billions", "5 factorial") is no unit;
otherwise 5 would be taken for the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from roll.rewards.math.denied_nouns import COUNTABLE, is_denied

_TABLE: dict[str, tuple[str, Fraction]] = {}
"""Dimension and factor of each unit, by each of its names."""


def _add(dimension: str, factor: Fraction | int | str, names: str) -> None:
    """Add a unit to `_TABLE` by each of its names, which `|` separates."""
    for name in names.split("|"):
        _TABLE[name] = (dimension, Fraction(factor))


_add("length", "0.001", "mm|millimeter|millimetre")
_add("length", "0.01", "cm|centimeter|centimetre")
_add("length", "0.1", "dm|decimeter|decimetre")
_add("length", 1, "m|meter|metre")
_add("length", 1000, "km|kilometer|kilometre")
_add("length", "0.0254", "in|inch|inches")
_add("length", "0.3048", "ft|foot|feet")
_add("length", "0.9144", "yd|yard")
_add("length", "1609.344", "mi|mile")
_add("mass", "0.001", "mg|milligram")
_add("mass", 1, "g|gm|gram")
_add("mass", 1000, "kg|kilogram|kilo")
_add("mass", 1_000_000, "tonne")
_add("mass", "28.349523125", "oz|ounce")
_add("mass", "453.59237", "lb|lbs|pound")
_add("mass ton", 1, "ton")
_add("time", "0.001", "ms|millisecond")
_add("time", 1, "s|sec|second")
_add("time", 60, "min|mins|minute")
_add("time", 3600, "h|hr|hrs|hour")
_add("time", 86400, "day")
_add("time", 604800, "week|wk")
_add("months", 1, "month")
_add("months", 12, "year|yr|yrs")
_add("months", 120, "decade")
_add("months", 1200, "century|centuries")
_add("volume", "0.001", "ml|mL|milliliter|millilitre")
_add("volume", 1, "l|L|liter|litre")
_add("volume cup", 1, "cup")
_add("volume cup", 2, "pint")
_add("volume cup", 4, "quart")
_add("volume cup", 16, "gallon|gal")
_add("volume spoon", 1, "teaspoon|tsp")
_add("volume spoon", 3, "tablespoon|tbsp")
_add("area", 1, "acre")
_add("area ha", 1, "hectare|ha")
_add("money $", 1, "dollar|usd|USD|buck")
_add("money $", "0.01", "cent|penny|pennies")
_add("money $", "0.05", "nickel")
_add("money $", "0.1", "dime")
_add("money euro", 1, "euro|EUR|eur")
_add("money yen", 1, "yen")
_add("money rupee", 1, "rupee|rs|Rs")
_add("angle", 1, "degree|deg|degrees")
_add("angle radian", 1, "radian|rad")
_add("speed mph", 1, "mph")
_add("speed kmh", 1, "kmh|kph|kmph")
_add("temperature C", 1, "celsius")
_add("temperature F", 1, "fahrenheit")
_add("kelvin", 1, "kelvin|K")
_add("newton", 1, "newton|N")
_add("joule", 1, "joule|J")
_add("watt", 1, "watt|W")
_add("volt", 1, "volt|V")
_add("hertz", 1, "hertz|Hz")
_add("unit", 1, "unit|units")
_IRREGULAR = {
    "people": "person", "men": "man", "women": "woman", "children": "child", "feet": "ft",
    "teeth": "tooth", "geese": "goose", "mice": "mouse", "leaves": "leaf", "halves": "half",
    "knives": "knife", "wolves": "wolf", "loaves": "loaf", "shelves": "shelf", "lives": "life",
    "vertices": "vertex", "fish": "fish", "sheep": "sheep", "deer": "deer", "person": "person",
}  # fmt: skip

_ARTICLES = frozenset({"the", "a", "an", "his", "this"})
_TAILS = (["in", "total"], ["total"], ["left"], ["each"], ["altogether"], ["remaining"])
"""Phrases that may follow a number or its unit and do not change the size."""
_POWER_WORDS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_JOINS = ("per", "/", "\\cdot")
_TERM = re.compile(r"([A-Za-z]+)\.?(?:\^\{?([23])\}?|([23]))?")
_PHRASE = re.compile(
    r"(?:(?<=[\d.})%])|\s+)[A-Za-z][A-Za-z.^{}]*[23]?\}?(?:(?:\s+|/|\\cdot|-)[A-Za-z][A-Za-z.^{}]*[23]?\}?){0,6}$"
)
_GLUED_TEXT = "mm cm km kg mg ml mL ft in yd lb lbs oz hr hrs min sec mph deg kmh kph dm"
_GLUED = frozenset(_GLUED_TEXT.split())
"""Short units that may follow a number without a space; other letters there are variables."""
LETTERS = {
    "m": "meters", "g": "grams", "s": "seconds", "L": "liters", "h": "hours", "N": "newtons",
    "J": "joules", "W": "watts", "V": "volts", "K": "kelvins",
}  # fmt: skip
"""Names of the units with one letter. Such a unit needs a space and a plain number before it."""
_LETTER = re.compile(r"[A-Za-z](?:\^?\{?[23]\}?)?")
_FORMULA = re.compile(r"[})!]$|\\(?!times|cdot)[A-Za-z]|(?<![A-Za-z\\])[A-Za-df-z](?![A-Za-z])")
"""Texts before a letter that show that the letter may be a factor and no unit."""
MAX_UNIT_CHARS = 60


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit behind a number."""

    dimension: tuple[tuple[str, int], ...]
    """Base dimensions with their powers, sorted; units of equal dimensions can be compared."""
    factor: Fraction
    """Size of the unit in the base units of its dimension."""
    adjectives: frozenset[str] = frozenset()
    """Adjectives of the counted noun ("5 red apples")."""


def unit_splits(text: str) -> Iterator[tuple[str, Unit]]:
    """Yield (text before a unit, unit) for every way to read the end of a tidied text as a unit.

    The longest unit comes first.

    Example: next(unit_splits("5 cm"))[0] == "5"; "5 squared" has no unit.
    """
    match = _PHRASE.search(text, max(1, len(text) - MAX_UNIT_CHARS)) if len(text) > 1 else None
    if match is None:
        return
    starts = [match.start(), *(match.start() + m.end() for m in re.finditer(r" ", match[0]))]
    for start in dict.fromkeys(starts):
        before, phrase = text[:start].rstrip(), text[start:].strip()
        glued = text[start - 1] != " " and text[start] != " "
        if not before or not phrase or (glued and not _may_be_glued(phrase)):
            continue
        if _LETTER.fullmatch(phrase) and _FORMULA.search(before):
            continue  # in LaTeX the letter may be a factor, because spaces there have no meaning
        unit = _read_unit(phrase, singular=_at_most_one(before))
        if unit is not None:
            yield before, unit


def _may_be_glued(phrase: str) -> bool:
    """Return whether a phrase begins with a unit that may follow a number without a space."""
    match = _TERM.match(phrase)
    return match is not None and match[1] in _GLUED


def _read_unit(phrase: str, *, singular: bool) -> Unit | None:
    """Return the unit that a phrase behind a number names, or None; `singular` if the number takes
    a singular noun ("1 apple", "1/2 cup")."""
    rest = _words(phrase)
    if [word.lower() for word in rest] in _TAILS or (singular and _is_share(rest)):
        return Unit((), Fraction(1))
    powers: dict[str, int] = {}
    adjectives: set[str] = set()
    factor, sign = Fraction(1), 1
    while rest:
        if rest[0].lower() in _JOINS:
            if not powers:
                return None
            sign = 1 if rest.pop(0) == "\\cdot" else -1
            continue
        term = _powered_term(rest, adjectives, singular=singular or sign < 0)
        if term is None:
            return None
        dimension, size, power = term
        powers[dimension] = powers.get(dimension, 0) + sign * power
        factor *= size ** (sign * power)
        if rest and rest[0].lower() not in _JOINS:
            # "miles an hour", "apples in total", "newton meters"
            if rest[0].lower() in ("a", "an") and len(rest) > 1:
                rest.pop(0)
                sign = -1
            elif [word.lower() for word in rest] in _TAILS:
                rest = []
            elif not _is_known(rest[0]) or dimension.startswith("count"):
                return None
    dimensions = tuple(sorted((d, p) for d, p in powers.items() if p))
    return Unit(dimensions, factor, frozenset(adjectives))


_SCALES = {"C": "celsius", "F": "fahrenheit", "K": "kelvin"}
_SCALE = re.compile(r"\bdeg(?:rees?)?\s+([CFK]|[Cc]elsius|[Ff]ahrenheit|[Kk]elvins?)(?![A-Za-z])")


def _words(phrase: str) -> list[str]:
    """Split a phrase into words and the signs in `_JOINS`; "deg C" becomes "celsius"."""
    phrase = _SCALE.sub(lambda match: _SCALES[match[1][0].upper()], phrase)
    return [word for word in re.split(r"\s+|(/|\\cdot)", phrase) if word]


def _powered_term(
    rest: list[str], adjectives: set[str], *, singular: bool
) -> tuple[str, Fraction, int] | None:
    """Take a noun and its words for a power ("cubic feet", "seconds squared") from the front of
    `rest`, and return what `_term` returns; None if they are no unit."""
    word, power_before = rest.pop(0), 1
    while word.lower() in ("square", "sq", "cubic", "cu") and rest:
        word, power_before = rest.pop(0), _POWER_WORDS[word.lower()]
    term = None if word.lower() in _JOINS else _term(word, rest, adjectives, singular=singular)
    if term is None:
        return None
    dimension, size, power = term
    power *= power_before
    if rest and rest[0].lower() in ("squared", "cubed"):
        power *= _POWER_WORDS[rest.pop(0).lower()]
    return None if dimension.startswith("count") and power != 1 else (dimension, size, power)


def _is_share(words: Sequence[str]) -> bool:
    """Return whether words behind a fraction or percentage name its whole ("of the pizza")."""
    rest = [word.lower() for word in words[1:]]
    return (
        words[0] == "of"
        and bool(rest)
        and not any(is_denied(w) and w not in _ARTICLES for w in rest)
    )


def same_size(a: Unit, b: Unit) -> Fraction | None:
    """Return the size of `a` in units of `b`, or None if they measure different things.

    The adjectives of one unit must include those of the other: apples may be red apples, but green
    apples are not red apples.
    """
    alike = a.adjectives <= b.adjectives or b.adjectives <= a.adjectives
    return a.factor / b.factor if a.dimension == b.dimension and alike else None


def _term(
    word: str, rest: list[str], adjectives: set[str], *, singular: bool
) -> tuple[str, Fraction, int] | None:
    """Return dimension, factor and power of one noun; None if it is no unit.

    If `word` is an adjective of a counted noun, the noun is taken from `rest`, and the adjective is
    added to `adjectives`.
    """
    match = _TERM.fullmatch(word)
    if match is None:
        return None
    name, power = match[1], int(match[2] or match[3] or 1)
    if len(name) == 1 and name not in LETTERS:
        return None
    known = _known(name)
    if known is not None and (match[3] is None or known[0] == "length"):
        return known[0], known[1], power
    low = name.lower()
    if power != 1 or (is_denied(low) and low not in COUNTABLE):
        return None
    if low in COUNTABLE and rest:
        return None
    plural = (low.endswith("s") and len(low) > 3 and not low.endswith("ss")) or low in _IRREGULAR
    if plural or (singular and len(low) > 2 and not rest):
        return f"count {_singular(low)}", Fraction(1), 1
    if rest and len(low) > 2 and not singular:
        following = _term(rest.pop(0), rest, adjectives, singular=False)
        if following is not None and following[0].startswith("count"):
            adjectives.add(low)
            return following
    return None


def _known(name: str) -> tuple[str, Fraction] | None:
    """Return dimension and factor of a name in `_TABLE`, also in capitals or plural; or None."""
    for form in (name, name.lower(), _singular(name.lower())):
        if form in _TABLE and not (len(name) > 1 and len(form) == 1):
            return _TABLE[form]
    return None


def _is_known(word: str) -> bool:
    """Return whether a word, with or without a power, names a unit by more than one letter."""
    match = _TERM.fullmatch(word)
    return match is not None and len(match[1]) > 1 and _known(match[1]) is not None


def _singular(word: str) -> str:
    """Return the singular of an English word by its ending or the irregular forms; other words
    unchanged."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y" if word[:-3] + "y" in _TABLE else word[:-1]
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _at_most_one(number: str) -> bool:
    """Return whether a number takes a singular noun: 1, a fraction or a percentage."""
    return number.strip() in ("1", "-1", "1.0") or any(
        mark in number for mark in ("/", "frac", "%", "percent")
    )
