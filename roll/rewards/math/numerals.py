r"""Reading of one number in any notation: plain, ratio, mixed, repeating, scaled, in another base.

Values are exact fractions. A decimal with enough digits also gets a tolerance in its last place,
because the decimal may be a rounded value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from roll.rewards.math.units import Unit, same_size, unit_splits

MAX_NUMBER_CHARS = 200
SIGNIFICANT_DIGITS = 6
"""Number of significant digits from which on a decimal may be a rounded value."""

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_TENS = r"(?:\\times|\\cdot|\*|x)10\^"
_PLAIN = re.compile(
    rf"(?P<mantissa>{_DECIMAL})(?:[eE](?P<exp>[-+]?\d{{1,3}})"
    rf"|{_TENS}(?:\{{(?P<power>[-+]?\d{{1,3}})\}}|(?P<digit>[-+]?\d{{1,3}})))?"
)
_TEN_TO = re.compile(r"10\^(?:\{(?P<power>[-+]\d{1,3})\}|\((?P<round>-\d{1,3})\))")
_QUOTIENT = (
    rf"(?:(?P<a>{_DECIMAL})/(?P<b>{_DECIMAL})"
    rf"|\\frac\{{(?P<c>-?{_DECIMAL})\}}(?:\{{(?P<d>-?{_DECIMAL})\}}|(?P<d1>\d))"
    r"|\\frac ?(?P<e>\d)(?:(?P<f>\d)|\{(?P<g>\d+)\}))"
)
_RATIO = re.compile(_QUOTIENT)
_MIXED = re.compile(
    r"(?P<whole>\d{1,9})(?:\+| )?"
    r"(?:(?<=[ +])(?P<a>\d+)/(?P<b>\d+)|\\frac\{(?P<c>\d+)\}(?:\{(?P<d>\d+)\}|(?P<d1>\d))"
    r"|\\frac ?(?P<e>\d)(?P<f>\d))"
)
_BARRED = re.compile(
    r"(?P<whole>\d*)\.(?P<fixed>\d*)"
    r"(?:\\(?:overline|bar|overbar|dot)(?:\{(?P<bar>\d+)\}|(?P<bar1>\d))|\((?P<paren>\d+)\))"
    r"(?:\\ldots)?"
)
_DOTTED = re.compile(
    r"(?P<whole>\d*)\.(?P<fixed>\d*)\\dot\{?(?P<first>\d)\}?(?P<inner>\d*)\\dot\{?(?P<last>\d)\}?"
)
_TRAILING = re.compile(r"(?P<whole>\d*)\.(?P<digits>\d{2,40})\\ldots")
_BASED = re.compile(
    r"\(?(?P<digits>\d[0-9A-Fa-f]*)\)?"
    r"(?:_(?:\{?\(?(?P<base>\d{1,2})\)?\}?|\{? ?(?P<word>[a-z]+) ?\}?)"
    r"| ?(?:in )?base[- ]?(?:(?P<base2>\d{1,2})|(?P<word2>[a-z]+)))"
)
_BASE_TEXT = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
)
_BASES = {name: i for i, name in enumerate(_BASE_TEXT.split(), start=2)}
_SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12, "quadrillion": 10**15, "lakh": 10**5, "crore": 10**7,
}  # fmt: skip
_SCALE = re.compile(rf"\s*(?:{'|'.join(_SCALES)})s?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Numeral:
    """Number that was read from a text."""

    value: Fraction
    """Exact value. A percentage is not divided by 100, because 50% may mean 0.5 or 50."""
    ulp: Fraction | None = None
    """One unit in the last place of a decimal that may be rounded; None for exact numbers."""
    percent: bool = False
    """True if the number is written as a percentage."""
    unit: Unit | None = None
    """Unit behind the number, if any."""


def read_number(text: str) -> Numeral | None:
    """Return the number in a tidied text, with its unit; None if the text is anything else.

    Example: read_number("12 million").value == 12_000_000; read_number("2 1/2").value == 2.5
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    bare = _read_share(text)
    if bare is not None:
        return bare
    for before, unit in unit_splits(text):
        found = _read_share(before)
        if found is not None:
            return replace(found, unit=unit)
    return None


def same_number(a: Numeral, b: Numeral) -> bool:
    """Return whether two numbers are equal, within half a unit in the last place of a decimal.

    A unit on one side only is ignored; two units must measure the same thing.
    """
    scale = Fraction(1)
    if a.unit is not None and b.unit is not None:
        found = same_size(a.unit, b.unit)
        if found is None:
            return False
        scale = found
    # If only one of the two numbers is a percentage, 50% may mean 0.5 or 50.
    factors = (Fraction(1), Fraction(1, 100)) if a.percent != b.percent else (Fraction(1),)
    for factor in factors:
        left, right = (factor, Fraction(1)) if a.percent else (Fraction(1), factor)
        left *= scale
        slack = max((a.ulp or Fraction(0)) * left, (b.ulp or Fraction(0)) * right) / 2
        if abs(a.value * left - b.value * right) <= slack:
            return True
    return False


def _read_share(text: str) -> Numeral | None:
    """Return the number in a text without a unit, or None. A percentage keeps its value (50 for
    50%) and is marked with `percent`."""
    if not text.endswith(("%", " percent", "percentage")):
        return _read(text)
    found = _read(re.sub(r"\s*(?:%|percent(?:age)?)$", "", text))
    return None if found is None else replace(found, percent=True)


def _read(text: str) -> Numeral | None:
    """Return the number in a text without unit or percent sign: signed, in any notation, times
    words like "million"; or None."""
    negative, text = _unsigned(text)
    ahead = negative
    if len(text) > 2 and text[0] == "(" and text[-1] == ")" and not _BASED.fullmatch(text):
        ahead, text = _unsigned(text[1:-1])  # -(2/3)
        negative = negative != ahead
    scale = Fraction(1)
    while (match := _SCALE.search(text)) and match.end() == len(text) and match.start():
        word = match[0].strip().lower()
        scale *= _SCALES[word if word in _SCALES else word[:-1]]
        text = text[: match.start()]
    found = _plain(text) or _ratio(text) or _repeating(text) or _based(text)
    if found is None and not (
        ahead and "+" in text
    ):  # -2+1/2 is a sum, in which only 2 is negative
        found = _mixed(text)
    if found is None:
        return None
    value, ulp = found
    value = -value if negative else value
    return Numeral(value * scale, None if ulp is None else ulp * scale)


def _unsigned(text: str) -> tuple[bool, str]:
    """Return whether a text begins with a minus sign, and the text without its sign."""
    return text.startswith("-"), text[1:] if text[:1] in ("-", "+") else text


def _digits(text: str) -> str:
    """Return a number without separators of thousands and without a point at its end."""
    return text.replace(",", "").replace(" ", "").rstrip(".")


def _plain(text: str) -> tuple[Fraction, Fraction | None] | None:
    """Return the value of an integer or decimal, also times a power of ten, and its last place if
    it may be rounded; or None."""
    power = _TEN_TO.fullmatch(text)
    if power is not None:
        return Fraction(10) ** int(power["power"] or power["round"]), None
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    mantissa = _digits(match["mantissa"])
    scale = Fraction(10) ** int(match["exp"] or match["power"] or match["digit"] or 0)
    decimals = len(mantissa.partition(".")[2])
    digits = len(mantissa.replace(".", "").lstrip("0"))
    rounded = decimals > 0 and digits >= SIGNIFICANT_DIGITS
    return Fraction(mantissa or "0") * scale, scale / 10**decimals if rounded else None


def _ratio(text: str) -> tuple[Fraction, None] | None:
    """Return the value of a quotient of two numbers, such as 3/4 or a fraction in LaTeX; None for
    any other text or a divisor of 0."""
    match = _RATIO.fullmatch(text)
    return None if match is None else _divided(match)


def _divided(match: re.Match[str]) -> tuple[Fraction, None] | None:
    """Return the quotient that a pattern with named groups found; None if it divides by zero."""
    found = match.groupdict()
    above = Fraction(_digits(found["a"] or found["c"] or found["e"]))
    below = next(found[key] for key in ("b", "d", "d1", "f", "g") if found.get(key))
    divisor = Fraction(_digits(below))
    return (above / divisor, None) if divisor else None


def _mixed(text: str) -> tuple[Fraction, None] | None:
    """Return the value of a mixed number (2 1/3) whose fraction is below 1; else None."""
    match = _MIXED.fullmatch(text)
    part = None if match is None else _divided(match)
    if match is None or part is None or not 0 < part[0] < 1:
        return None
    return int(match["whole"]) + part[0], None


def _repeating(text: str) -> tuple[Fraction, Fraction | None] | None:
    """Return the value of a repeating decimal, exact unless "..." follows digits that show no
    block; None if it is none."""
    if match := _BARRED.fullmatch(text):
        fixed, block = match["fixed"], match["bar"] or match["bar1"] or match["paren"]
    elif match := _DOTTED.fullmatch(text):
        fixed, block = match["fixed"], match["first"] + match["inner"] + match["last"]
    elif match := _TRAILING.fullmatch(text):
        split = _block(match["digits"])
        if split is None:
            return _cut_off(match["whole"], match["digits"])
        fixed, block = split
    else:
        return None
    start = Fraction(int(match["whole"] or "0")) + Fraction(int(fixed or "0"), 10 ** len(fixed))
    return start + Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(fixed)), None


def _cut_off(whole: str, digits: str) -> tuple[Fraction, Fraction] | None:
    """Return value and last place of "0.142857...": the middle of the interval of possible values,
    and one unit in the last place; None if there are too few digits."""
    if len((whole + digits).lstrip("0")) < SIGNIFICANT_DIGITS:
        return None
    ulp = Fraction(1, 10 ** len(digits))
    return Fraction(int(whole + digits)) * ulp + ulp / 2, ulp


def _block(digits: str) -> tuple[str, str] | None:
    """Split the digits before "..." into fixed digits and the block that repeats.

    The block must be there at least twice and in at least 3 digits; otherwise return None.
    """
    for start in range(len(digits)):
        rest = digits[start:]
        for size in range(1, len(rest) // 2 + 1):
            block = rest[:size]
            if len(rest) >= max(3, 2 * size) and (block * len(rest))[: len(rest)] == rest:
                return digits[:start], block
    return None


def _based(text: str) -> tuple[Fraction, None] | None:
    """Return the value of digits with a base (101_2, 101 base two); None without a base or if a
    digit does not fit."""
    match = _BASED.fullmatch(text)
    if match is None:
        return None
    number = match["base"] or match["base2"]
    base = int(number) if number else _BASES.get(match["word"] or match["word2"] or "", 0)
    if not 2 <= base <= 36:
        return None
    try:
        return Fraction(int(match["digits"], base)), None
    except ValueError:
        return None  # a digit that the base does not have
