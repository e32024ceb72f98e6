"""Equivalence of two answers by math-verify; runs in the child processes of the math reward.

This module has no limits of its own. Huge powers, deep nesting and endless simplification end when
the process is killed; its time and memory are limited from outside (see child.py).

math-verify compares expressions only, and its input and options are restricted first. By default it
makes all letters lower-case, reads a word as the product of its letters, removes letters that may
be units (3t), and drops primes, transposes and number bases. Here the case of a letter counts, and
each word, primed letter or decorated letter is one symbol.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

from roll.rewards.math.matching import compare
from roll.rewards.math.notation import tidy
from roll.rewards.math.numerals import read_number
from roll.rewards.math.plain_equivalence import plain_leaf
from roll.rewards.math.shapes import read_shape
from roll.rewards.math.units import Unit, same_size, unit_splits

DIGITS = 50
"""Number of digits to which expressions without variables are computed for a comparison."""
AGREEMENT = 40
"""Number of digits in which two such values must agree."""

_FUNCTIONS_TEXT = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp min max gcd "
    "lcm det sqrt frac mod pi"
)
_FUNCTIONS = frozenset(_FUNCTIONS_TEXT.split())
_WORDS_TEXT = "no on not odd yes all any two one six ten dne non nor for was saw the and but"
_WORDS = frozenset(_WORDS_TEXT.split())
_DECORATED = re.compile(
    r"\\(?:vec|bar|hat|tilde|overline|underline|dot|ddot|widehat|widetilde|overrightarrow"
    r"|mathbb|mathcal|mathfrak|mathscr|mathring)(?:\{[^{}]*\}|[A-Za-z0-9])(?:_(?:\{[^{}]*\}|\w))?"
)
_PRIMED = re.compile(r"[A-Za-z](?:_\w)?(?:'+|\^\{?(?:\\prime)+\}?)(?:\([^()]*\))?")
_TRANSPOSED = re.compile(
    r"\^(?:\{(?:T|\\top|\\intercal|\\mathsf T)\}|T(?![A-Za-z])|\\top|\\intercal)"
)
_NAMED = re.compile(r"\\(?:aleph|beth|ell|hbar|nabla|partial|wp)(?:_(?:\{[^{}]*\}|\w))?(?![a-z])")
_RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?:_(?:\{[^{}]*\}|\w))?")
_CAPITAL = re.compile(r"(?<![\\A-Za-z])[EI](?![A-Za-z])(?!_)")
_COMMAND_OR_ENVIRONMENT = re.compile(r"(\\(?:begin|end)\{[a-z]+\}(?:\{[^{}]*\})?)")
_BASED = re.compile(r"(?<![\w.])(\d+)_(?:\{(\d+)\}|(\d))")
_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z])(sqrt|pi|infty|sin|cos|tan|log|ln|exp)(?![A-Za-z])")

_PROSE = re.compile(r"(?<![\\A-Za-z])(?!sqrt|sin|cos|tan|log|exp)[A-Za-z]{3,}")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")


class _Symbols:
    """Symbols that replace indivisible pieces of text; equal pieces get the same symbol."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self.words: set[str] = set()
        """Words that the latest call of `put` replaced."""

    def of(self, text: str) -> str:
        """Return the symbol that replaces `text`, in LaTeX."""
        text = re.sub(r"[{}\s]", "", text)
        return f"\\xi_{{{self._names.setdefault(text, str(9000 + len(self._names)))}}}"

    def put(self, text: str) -> str:
        """Replace by symbols: words, transpose signs, the letters E and I if they stand alone, and
        primed, decorated or named letters (such as `\\hbar`)."""
        self.words = set()
        pieces = _COMMAND_OR_ENVIRONMENT.split(text)
        return "".join(p if i % 2 else self._put(p) for i, p in enumerate(pieces))

    def _put(self, text: str) -> str:
        """Replace the indivisible letters and words in a piece of text that holds no LaTeX
        environment; see `put`."""
        text = text.replace("\\dagger", "\\top")
        text = _TRANSPOSED.sub(lambda m: f"^{{{self.of('transposed')}}}", text)
        for pattern in (_DECORATED, _PRIMED, _NAMED):
            text = pattern.sub(
                lambda m: self.of(m[0].replace("\\prime", "'").replace("^", "")), text
            )
        text = _RUN.sub(lambda m: self._run(m[0]), text)
        return _CAPITAL.sub(lambda m: self.of(m[0]), text)

    def _run(self, run: str) -> str:
        """Replace a run of letters by a symbol, unless it is a function or looks like a product
        (xy, 2abc, kT)."""
        letters = run.partition("_")[0]
        if letters in _FUNCTIONS:
            return run
        word = len(letters) > 3 or letters.lower() in _WORDS or (letters.isupper())
        if not word:
            return run
        self.words.add(run)
        return self.of(run)


def make_checker() -> Callable[[tuple[str, str]], bool]:
    """Import math-verify (about a second) and return the check of one (truth, answer) pair."""
    import math_verify  # noqa: F401  (imported here, so that the first check is not slower)

    # It warns once that its timeouts are off; they are off on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def leaf(truth: str, answer: str) -> bool:
        plain = plain_leaf(truth, answer)
        return _same_by_algebra(truth, answer) if plain is None else plain

    def equivalent(pair: tuple[str, str]) -> bool:
        truth, answer = (tidy(text) for text in pair)
        verdict = compare(read_shape(truth), read_shape(answer), leaf)
        return _same_by_algebra(truth, answer) if verdict is None else verdict

    # The first parse builds the tables of the grammar; do it before the first sample.
    equivalent(("\\frac{1}{2}", "x^2"))
    return equivalent


def _same_by_algebra(truth: str, answer: str) -> bool:
    """Return whether two tidied texts are equal expressions, with or without units at the end."""
    if _same_expression(truth, answer, Fraction(1)):
        return True
    for a, b in product(_readings(truth), _readings(answer)):
        scale = Fraction(1)
        if a.unit is not None and b.unit is not None:
            found = same_size(a.unit, b.unit)
            if found is None:
                continue
            scale = found
        elif a.unit is None and b.unit is None:
            continue
        if _same_expression(a.text, b.text, scale):
            return True
    return False


def _same_expression(truth: str, answer: str, scale: Fraction) -> bool:
    """Return whether `scale` times the expression `truth` equals the expression `answer`."""
    import math_verify
    import sympy

    atoms = _Symbols()
    texts, words = [], []
    for text in (truth, answer):
        texts.append(atoms.put(text))
        words.append(atoms.words)
    if words[0] != words[1]:
        return False  # algebra cannot cancel a word, and the parser takes seconds for prose
    a, b = (_parse(text) for text in texts)
    if a is None or b is None:
        return False
    if scale != 1:
        a *= sympy.Rational(scale.numerator, scale.denominator)
    number = _same_value(a, b, truth, answer)
    if number is not None:
        return number
    if isinstance(a, sympy.Symbol) or isinstance(b, sympy.Symbol):
        return (
            isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr) and sympy.simplify(a - b) == 0
        )
    return bool(
        math_verify.verify(
            a, b, timeout_seconds=None, allow_set_relation_comp=True, numeric_precision=DIGITS
        )
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """Possible reading of a text: an expression without a unit, or with a unit at its end."""

    text: str
    unit: Unit | None


def _readings(text: str) -> list[_Reading]:
    """Return the text as a whole, and each split into expression and unit; skip splits with words
    or a glued letter in front."""
    return [
        _Reading(text, None),
        *(
            _Reading(before, unit)
            for before, unit in unit_splits(text)
            if not _PROSE.search(before)
            and (not _LETTER.search(before) or text[len(before)] == " ")
        ),
    ]


def _parse(text: str) -> Any:
    """Parse a text to a sympy object with decimals as exact fractions; return None on failure."""
    import sympy
    from latex2sympy2_extended import latex2sympy2 as reader
    from math_verify.grader import should_treat_as_complex

    normal = reader.NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
    )
    if _BASED.search(text) or "'" in text:
        return None
    text = _PLAIN_WORD.sub(r"\\\1", text)
    try:
        found = reader.latex2sympy(
            reader.normalize_latex(text, normal),
            is_real=not should_treat_as_complex(text),
            convert_degrees=False,
            normalization_config=None,
            conversion_config=reader.ConversionConfig(lowercase_symbols=False),
        )
        floats = found.atoms(sympy.Float) if isinstance(found, sympy.Basic) else set()
        return found.xreplace({f: sympy.Rational(str(f)) for f in floats}) if floats else found
    except Exception:  # noqa: BLE001 - the parser may raise any exception
        return None


def _same_value(a: Any, b: Any, truth: str, answer: str) -> bool | None:
    """Return whether two expressions without variables have the same value, to `AGREEMENT` digits.

    If `truth` or `answer` is a rounded decimal, its rounding error is allowed. Returns None if an
    expression has variables or cannot be computed.
    """
    import sympy

    if not all(isinstance(x, sympy.Expr) and not x.free_symbols for x in (a, b)):
        return None
    try:
        values = [sympy.N(x.doit(), DIGITS) for x in (a, b)]
    except (TypeError, ValueError, ArithmeticError, NotImplementedError):
        return None
    if not all(v.is_number and v.is_finite for v in values):
        return None
    slack = sum(
        sympy.Rational(n.ulp.numerator, n.ulp.denominator) / 2
        for n in map(read_number, (truth, answer))
        if n is not None and n.ulp is not None
    )
    size = max(abs(v) for v in values)
    return bool(abs(values[0] - values[1]) <= max(slack, size * sympy.Float(10) ** -AGREEMENT))
