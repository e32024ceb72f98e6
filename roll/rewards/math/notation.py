r"""Normalisation of the notation of an answer: one sign for one thing, no marks without meaning.

These are normalised: Unicode signs (minus, roots, fractions, superscripts, Greek letters, thin
spaces), spacing and size commands of LaTeX, dollar signs, and the various commands for one
relation. The value never changes: `plain_equivalence` and `equivalence` decide which texts are
equal.
"""

from __future__ import annotations

import re

from roll.rewards.math.signs import (
    FRACTIONS,
    GREEK,
    INVISIBLE,
    SIGNS,
    SUBSCRIPTS,
    SUPERSCRIPTS,
    THIN,
)
from roll.rewards.math.units import LETTERS

_CHARACTERS = str.maketrans(
    SIGNS
    | {sign: f"\\{name} " for sign, name in GREEK.items()}
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
    | dict.fromkeys(INVISIBLE)
)
_FRACTION = re.compile(f"[{''.join(FRACTIONS)}]")
_RAISED = re.compile(f"[{''.join(SUPERSCRIPTS)}]+")
_LOWERED = re.compile(f"[{''.join(SUBSCRIPTS)}]+")
_RANGE_DASH = re.compile(r"(?<!\d)\u2013|\u2013(?!\d)")
_THIN_THOUSANDS = re.compile(rf"(?<=\d)[{THIN}](?=\d{{3}}(?!\d))")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+ ?)|(?=\{))")
_OVERLINED = re.compile("((?:\\d\u0305)+)")

_COMMANDS = [
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|mathstrut|phantom\{\})"
     r"(?![a-zA-Z])", ""),
    (r"\\(?:leqslant|leq|leqq)(?![a-z])|<=|=<", r"\\le "),
    (r"\\(?:geqslant|geq|geqq)(?![a-z])|>=", r"\\ge "),
    (r"\\(?:neq|not=)(?![a-z])|!=", r"\\ne "),
    (r"\\lt(?![a-z])", "<"),
    (r"\\gt(?![a-z])", ">"),
    (r"\\(?:varnothing|O|empty)(?![a-zA-Z])", r"\\emptyset "),
    (r"\\(?:lbrace)(?![a-z])", r"\\{"),
    (r"\\(?:rbrace)(?![a-z])", r"\\}"),
    (r"\\(?:lvert|rvert|vert)(?![a-z])", "|"),
    (r"\\(?:lbrack)(?![a-z])", "["),
    (r"\\(?:rbrack)(?![a-z])", "]"),
    (r"\\(?:colon)(?![a-z])", ":"),
    (r"\\(?:infin|infty)(?![a-z])", r"\\infty "),
    (r"\\(?:percent)(?![a-z])|\\%", "%"),
    (r"\\(?:dollar|euro|pounds)(?![a-z])|\\?\$|[\u20ac\u00a3\u00a5\u20b9]", ""),
    # A new row of a matrix, with a distance behind it: the bracket is none of a formula.
    (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),
    (r"(?<!\\)\\[()\[\]]", ""),
    (r"\\langle(?![a-z])", "("),
    (r"\\rangle(?![a-z])", ")"),
    (r"\\(?:dots|cdots|dotsc|dotsb)(?![a-z])|\.{3,}", r"\\ldots "),
    (r"\\(?:times|ast)(?![a-z])", r"\\times "),
    (r"\\R(?![a-zA-Z])", r"\\mathbb{R}"),
    (r"\\div(?![a-z])", "/"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-z])", " degrees "),
    (r"\\operatorname\*?\s*\{([a-zA-Z]+)\}", r" \1 "),
    (r"\{([,:;.])\}", r"\1"),
    (r"(?<!\\)sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<!\\)sqrt ?(\d+|[A-Za-z](?![A-Za-z]))", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty "),
    # A comma with a space behind it separates a list: "12, 345" is 12 and 345.
    (r"(?<=\d),\s+(?=\d{3}(?!\d))", ";"),
    (r"\\sqrt\s*(\[\d\])?(\d)(?!\d)", r"\\sqrt\1{\2}"),
    (r"\\sqrt\s+([a-zA-Z])(?![a-zA-Z])", r"\\sqrt{\1}"),
    (r"\\(?:quad|qquad|enspace|thinspace)(?![a-z])|(?<!\\)\\ |~", " "),
    (r"(\\[A-Za-z]+)\\[!,;:]", r"\1 "),
    (r"(?<!\\)\\[!,;:]|\\(?:hspace|vspace|label|tag)\*?\{[^{}]*\}", ""),
]  # fmt: skip
_REWRITES = [(re.compile(pattern), replacement) for pattern, replacement in _COMMANDS]
_WRAPPER = re.compile(
    r"\\(?:text|textrm|textnormal|mathrm|textbf|mathbf|bm|boldsymbol|mbox|textit|mathit|texttt|mathsf|"
    r"rm|bf)\s*\{([^{}]*)\}"
)
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|mbox|textbf|bm|boldsymbol)\s*\{")
_UPRIGHT_LETTER = re.compile(
    r"((?:(?<=[\d})!])|(?<=\\pi))(?:\s|~|\\[ ,;:!])*"
    r"\\(?:text|textrm|textnormal|mathrm|mbox|rm)\s*\{\s*)"
    rf"([{''.join(LETTERS)}])(?=[\s}}^/])"
)
"""A letter in upright text behind a number, which is a unit; in a formula it may be a variable."""
_MONEY = re.compile(r"(?:\\\$|\$) ?(-?(?:\d[\d,]*)?(?:\.\d+|\d))\.?")
_IN_FORMULA = re.compile(r"\$\s*(.*[^\s\\])\s*\$|\\\(\s*(.*[^\s\\])\s*\\\)", re.DOTALL)
MAX_MONEY_CHARS = 60
_ANGLE = r"(-?\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)"
_OF_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)?)\s*"
    rf"(?:\(\s*{_ANGLE}\s*\)|\{{\s*{_ANGLE}\s*\}}|{_ANGLE})"
)
"""A trigonometric function of an angle in degrees."""
_PI_METERS = re.compile(r"(?<=π) ?m(?=[²³])|(?<=π) m$")
_OLD_WRAPPER = re.compile(r"\\(?:rm|bf|it)(?![a-z])\s*")
_BRACED_SCRIPT = re.compile(r"([_^])\s*\{\s*([0-9A-Za-z])\s*\}")
_BESIDE_SYMBOL = re.compile(r"\s*([^\w\s\\])(?:(?<=[})\]%!])(\s)\s*(?=[A-Za-z])|\s*)|\s+(?=\\)")
"""White space beside a symbol or before a LaTeX command, to be removed. One space stays between the
end of a number or expression and a letter, because the letter may begin a unit."""
_AFTER_COMMAND = re.compile(r"(\\[A-Za-z]+)\s+(?![A-Za-z])")
_LEADING_RELATION = re.compile(r"^(?:=|\\approx ?|\\therefore ?)+")
_ORDINAL = re.compile(r"^(\d+)(?:\^?\{? ?(?:st|nd|rd|th) ?\}?)$")
_EMPTY_SET = re.compile(r"\\\{\\\}|\{\}")
MAX_WRAPPERS = 4


def tidy(text: str) -> str:
    r"""Return the text in normalised notation; see the module docstring.

    Example: tidy("$\\dfrac{1}{2}\\,\\text{cm}$") == "\\frac{1}{2} cm"; tidy("√2") == "\\sqrt{2}"
    """
    text = _PI_METERS.sub(" meters", text)
    # Shorten long runs of blanks: the patterns below take time with the square of their length.
    text = re.sub(r"\s{2,}", " ", plain_characters(text)).strip().strip("*`")
    text = _name_dollars(text)
    while (whole := _WRAPPED.match(text)) and _closes_at_end(text[whole.end() - 1 :]):
        text = text[whole.end() : -1].strip()
    text = _UPRIGHT_LETTER.sub(lambda m: m[1] + LETTERS[m[2]], text)
    for _ in range(MAX_WRAPPERS):
        text, found = _WRAPPER.subn(r" \1 ", text)
        if not found:
            break
    text = _OLD_WRAPPER.sub(" ", text)
    text = _OF_DEGREES.sub(
        lambda m: f"{m[1]}{{(\\frac{{{m[2] or m[3] or m[4]}\\pi}}{{180}})}}", text
    )
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _BRACED_SCRIPT.sub(r"\1\2", text)
    text = _BESIDE_SYMBOL.sub(r"\1\2", text)
    text = _AFTER_COMMAND.sub(r"\1", text)
    text = _LEADING_RELATION.sub("", text)
    text = _ORDINAL.sub(r"\1", text)
    text = _EMPTY_SET.sub(r"\\emptyset", text) if len(text) < 8 else text
    text = " ".join(text.split()).rstrip(".;,")
    return _without_outer_braces(text)


def plain_characters(text: str) -> str:
    r"""Return the text with ASCII and LaTeX in place of Unicode signs of the same meaning.

    Example: plain_characters("2½ ≤ x²") == "2\\frac{1}{2} \\le  x^{2}"
    """
    if text.isascii():
        return text
    text = _OVERLINED.sub(lambda m: f"\\overline{{{m[1].replace(chr(0x305), '')}}}", text)
    text = _FRACTION.sub(lambda m: "\\frac{{{}}}{{{}}}".format(*FRACTIONS[m[0]]), text)
    text = _RAISED.sub(lambda m: f"^{{{''.join(SUPERSCRIPTS[c] for c in m[0])}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{''.join(SUBSCRIPTS[c] for c in m[0])}}}", text)
    text = _THIN_THOUSANDS.sub("", text)
    text = re.sub(f"[{THIN}\u3000]", " ", text)
    # An en dash between two digits means a range; elsewhere it is a minus sign.
    text = _RANGE_DASH.sub("-", text)
    text = text.translate(_CHARACTERS)
    return _ROOT.sub(
        lambda m: f"\\sqrt{{{m[1] or (m[2] or '').strip()}}}" if m[0] != "√" else "\\sqrt", text
    )


def _name_dollars(text: str) -> str:
    r"""Return an amount such as "\$18" as "18 dollars", so that it differs from 18 cents.

    Any other text is returned unchanged.
    """
    if len(text) > MAX_MONEY_CHARS:
        return text
    formula = _IN_FORMULA.fullmatch(text)
    money = _MONEY.fullmatch(text if formula is None else formula[1] or formula[2])
    return text if money is None else f"{money[1]} dollars"


def _without_outer_braces(text: str) -> str:
    while len(text) > 2 and text[0] == "{" and text[-1] == "}" and _closes_at_end(text):
        text = text[1:-1].strip()
    return text


def _closes_at_end(text: str) -> bool:
    """Return whether the brace that opens the text is closed by its last character."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return i == len(text) - 1
    return False
