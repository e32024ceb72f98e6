"""Compare two answers without a computer algebra system: as text, and as plain numbers.

This settles nearly all ordinary answers in microseconds and is safe on any input; what it cannot
settle (None) goes to a child process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARS = 200
SIGNIFICANT_DIGITS = 6
"""A decimal with this many significant digits may stand for a number that it rounds."""

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<mantissa>{_DECIMAL})"
    r"(?:[eE](?P<exp>[-+]?\d{1,3})|(?:\\times|\\cdot|\*|x|\u00d7)10\^\{?(?P<power>[-+]?\d{1,3})\}?)?)"
)
_RATIO = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<a>{_DECIMAL})/(?P<b>{_DECIMAL})"
    rf"|\\frac\{{(?P<c>-?(?:{_DECIMAL}))\}}\{{(?P<d>-?(?:{_DECIMAL}))\}}|\\frac(?P<e>\d)(?P<f>\d))"
)
_SHORT_UNITS = "mm|cm|km|kg|mg|ml|mL|ft|in|yd|lb|lbs|oz|hr|hrs|min|sec|mph|deg"
_UNIT = re.compile(
    # A word after a space; 2ab and 2 ab are products, so shorter ones must be known.
    r"(?<=[\d.}])(?:\s+(?P<word>[A-Za-z]{3,}(?:[ /][A-Za-z]+)*|[mgsLh])"
    rf"|\s*(?P<short>{_SHORT_UNITS}))(?P<power>\^\{{?[23]\}}?)?$"
)
_NOT_UNITS = frozenset(
    {"hundred", "thousand", "million", "billion", "trillion", "dozen", "mod", "log", "sin", "cos"}
    | {"tan", "half", "third", "thirds", "quarter", "quarters", "halves", "tenths", "plus", "and"}
)
_DROPPED = re.compile(r"\\[!,;: ]|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\$|\\\(|\\\)|~")
_WRAPPERS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textit)\s*\{([^{}]*)\}")
_BESIDE_SYMBOL = re.compile(r"\s*([^\w\s])\s*")


@dataclass(frozen=True, slots=True)
class _Number:
    value: Fraction
    ulp: Fraction | None
    """One unit in the last place of a decimal with enough digits; None for exact numbers."""
    percent: bool
    unit: str


def plainly_equal(truth: str, answer: str) -> bool | None:
    """True or False where text or numbers decide, None where they cannot.

    Example: plainly_equal("1/2", "0.5") is True; plainly_equal("2", "3") is False;
    plainly_equal("2x", "x + x") is None.
    """
    left, right = tidy(truth), tidy(answer)
    if left == right:
        return bool(left)
    if not left or not right:
        return False
    if _same_words(left, right):
        return True
    a, b = _number(left), _number(right)
    if a is None or b is None:
        return None
    return _same_number(a, b)


def tidy(text: str) -> str:
    """The text without what has no meaning: dollar signs, spacing commands, bracket sizes."""
    text = text.strip().replace("\u2212", "-").replace("\\%", "%").replace("{,}", ",")
    text = text.replace("\\$", "").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.replace("\\dollar", "").replace("\\times ", "\\times").replace("\\cdot ", "\\cdot")
    text = _WRAPPERS.sub(r" \1 ", text)
    text = _DROPPED.sub("", text)
    text = re.sub(r"\^\{?\\circ\}?|\u00b0|\\degree", " degrees", text)
    text = _BESIDE_SYMBOL.sub(r"\1", text)
    return " ".join(text.split()).rstrip(".")


def _same_words(left: str, right: str) -> bool:
    left, right = (re.sub(r"^\((\w)\)$", r"\1", text) for text in (left, right))
    # One letter may be a variable, where k and K differ; words are Yes, true, even.
    words = all(len(text) > 1 and text.replace(" ", "").isalpha() for text in (left, right))
    return left == right or (words and left.lower() == right.lower())


def _number(text: str) -> _Number | None:
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = text.lstrip("\u20ac\u00a3")
    percent = text.endswith(("%", " percent"))
    if percent:
        text = text.removesuffix("%").removesuffix(" percent")
    unit = ""
    found = _UNIT.search(text)
    if found and not _NOT_UNITS & set((found["word"] or "").lower().split()):
        unit, text = found.group().strip().lower(), text[: found.start()]
    parsed = _plain(text) or _ratio(text)
    return None if parsed is None else _Number(parsed[0], parsed[1], percent, unit)


def _plain(text: str) -> tuple[Fraction, Fraction | None] | None:
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    mantissa = match["mantissa"].replace(",", "")
    scale = Fraction(10) ** int(match["exp"] or match["power"] or 0)
    value = Fraction(mantissa.rstrip(".") or "0") * scale
    decimals = len(mantissa.partition(".")[2])
    digits = len(mantissa.replace(".", "").lstrip("0"))
    rounded = decimals > 0 and digits >= SIGNIFICANT_DIGITS
    ulp = scale / 10**decimals if rounded else None
    return (-value if match["sign"] == "-" else value), ulp


def _ratio(text: str) -> tuple[Fraction, None] | None:
    match = _RATIO.fullmatch(text)
    if match is None:
        return None
    above = Fraction((match["a"] or match["c"] or match["e"]).replace(",", "").rstrip("."))
    below = Fraction((match["b"] or match["d"] or match["f"]).replace(",", "").rstrip("."))
    if below == 0:
        return None
    return (-above if match["sign"] == "-" else above) / below, None


def _same_number(a: _Number, b: _Number) -> bool:
    if a.unit and b.unit and a.unit.rstrip("s") != b.unit.rstrip("s"):
        return False
    # Of two numbers only one of which is a percentage, 50% may mean 0.5 and may mean 50.
    factors = (Fraction(1), Fraction(1, 100)) if a.percent != b.percent else (Fraction(1),)
    for factor in factors:
        left, right = (a.value * factor, b.value) if a.percent else (a.value, b.value * factor)
        slack = max((n.ulp or Fraction(0)) / 2 for n in (a, b))
        if left == right or (abs(left - right) <= slack):
            return True
    return False
