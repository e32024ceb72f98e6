r"""Search for the option that a response chooses, such as `C` in "so the answer is (C)."

A letter counts only where the response states an answer: in a box, after words such as "the answer
is", or alone on a line. Elsewhere "A" is an article and "(B)" repeats the question. Every function
takes linear time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roll.rewards.math.final_answer import last_box

MAX_LINE_CHARS = 300
"""Largest length of a line that may be an answer by itself, in characters."""

# Runs of blanks and stars are possessive: others could be divided in as many ways as they are long.
_WORDS = r"(?:[ \t]++(?!not\b|isn)[\w'-]{1,20}){0,6}?"
_VERB = r"(?:is|are|was|would be|should be|must be|has to be|will be)\b(?![ \t]+not\b)|[:=\uff1a]"
_STATED = re.compile(
    rf"\b(?:answers?|(?:correct|right|best|final|chosen)[ \t]++(?:option|choice|one|letter))\b\**+"
    rf"{_WORDS}[ \t]*+\**+[ \t]*+(?:{_VERB})"
    r"|\b(?:I|we)(?:['\u2019](?:ll|d)|[ \t]+will|[ \t]+would)?[ \t]+"
    r"(?:choose|pick|select|go[ \t]+with)\b"
    r"|\b(?:option|choice|letter)\b\**[ \t]*[:=]|\banswer\b\**[ \t]+[-\u2013\u2014](?=[ \t])"
    r"|####|<answer>"
    r"|\u7b54\u6848[ \t]*(?:[\u662f\u4e3a\u9009:\uff1a][ \t]*)+"
    r"|[\u6545\u5e94]\u9009[ \t]*[:\uff1a]?",
    re.IGNORECASE,
)
_CALLED_RIGHT = re.compile(
    r"(?<!nor )(?<!or )(?<!and )(?<!not )(?<!neither )(?<![^\W_])([A-Z])[*_)\]]{0,3}"
    r"[ \t]+is[ \t]+(?:(?:the[ \t]+)?(?:correct|right|best)\b"
    r"|(?:the|my)[ \t]+(?:final[ \t]+)?answer\b)"
)
_BEFORE = re.compile(
    r"(?:[\s*_`\"'\u201c\u2018(\[{<$:]|\\(?:text|textbf|mathrm|mathbf|boxed|fbox)\s*\{|\\[(\[]"
    r"|(?:the\s+)?(?:option|choice|letter)s?\b)*+",
    re.IGNORECASE,
)
_LETTER = re.compile(r"([A-Za-z])(?![^\W\u2e80-\u9fff]|['\u2019])")
_AFTER = re.compile(r"[ \t]*[*_`\"'\u201d\u2019)\]}$]*")
_NEXT = re.compile(
    r"\s*(?:(?:,\s*)?\b(?:and|or)\b(?:\s+(?:maybe|perhaps|possibly|also|even)\b)?|[,/;&+|]"
    r"|[-.~](?=[A-Z](?!\w))|\s|(?<=\s)|(?=[(\[]))\s*",
    re.IGNORECASE,
)
_END = re.compile(r"[ \t]*(?:$|[\n.,;:!?<)}\]\\$*-]|\u2014|because\b|since\b|as\b)")
_JUST_LETTERS = re.compile(r"[A-Z](?:[\s,;/&+]+(?:(?:AND|OR)\b[\s,;/&+]*)?[A-Z])*")


@dataclass(frozen=True, slots=True)
class Choice:
    """Options that a response chooses."""

    letters: frozenset[str]
    """Capital letters of the options; empty if no option is named."""
    boxed: bool = False
    """True if they stood in a box."""


NOTHING = Choice(frozenset())


def find_choice(final: str, options: Mapping[str, str], *, truncated: bool = False) -> Choice:
    r"""Return the options that a response chooses.

    The last box decides. Without a box, the last statement decides, such as "the answer is (C)",
    "Answer: C", "I choose C", "option C is correct", "#### C" or `<answer>C</answer>`; without one,
    the lines that consist of one option and nothing else. A box, a statement or such lines that
    name several options choose all of these.

    Instead of the letter its text may stand there, in any case and without punctuation at its ends.
    A small letter counts in brackets, in a box, and before the end of a line or a punctuation mark.
    "A" and "I" before a word are no letters.

    Args:
        final: text after the thoughts.
        options: letters, in capitals, and the texts of their options; texts may be empty.
        truncated: True if the response was cut at its token limit. Then only a box is an answer.

    Example: find_choice("I'd say \\boxed{C}.", dict.fromkeys("ABCD", "")).letters == {"C"}
    """
    box = last_box(final)
    if box is not None:
        return Choice(_in_field(box, options), boxed=True)
    if truncated:
        return NOTHING
    ends: list[tuple[int, str | None]] = [(match.end(), None) for match in _STATED.finditer(final)]
    ends += [(match.start(1), match[1]) for match in _CALLED_RIGHT.finditer(final)]
    for place, letter in sorted(ends, key=lambda each: each[0], reverse=True)[:20]:
        if letter is not None:
            stated = frozenset({letter}) & options.keys()
        else:
            stated = _named(final, place, options) or _text_of(_line_at(final, place), options)
        if stated:
            return Choice(frozenset(stated))
    return Choice(frozenset().union(*(_alone(line, options) for line in _short_lines(final))))


def letters_of(truth: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the letters in a ground truth: `C`, `(c)`, `C. Paris`, `A, C`, a box, or the text of
    an option; an empty set if there are none."""
    box = last_box(truth)
    return _in_field((truth if box is None else box).rpartition("####")[2].strip(), options)


def _in_field(field: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the options in a text that is an answer by itself."""
    field = field[:MAX_LINE_CHARS].strip()
    bare = re.sub(r"\\(?:text|textbf|mathrm|mathbf)\s*|[{}()\[\]$*.\s]", " ", field).strip()
    if _JUST_LETTERS.fullmatch(bare.upper()):
        found = frozenset(re.findall(r"\b[A-Z]\b", bare.upper()))
        return found if found <= options.keys() else frozenset()
    if re.fullmatch(r"[A-Z]+", bare) and options.keys() >= set(bare):
        return _text_of(bare, options) or frozenset(bare)
    return (
        _text_of(field, options)
        or _text_of(bare, options)
        or _alone(field, options)
        or _named(field, 0, options)
    )


def _named(text: str, place: int, options: Mapping[str, str]) -> frozenset[str]:
    """Return the options whose letters stand at a place of a text, one or a list of them."""
    found: set[str] = set()
    while len(found) <= len(options):
        before = _BEFORE.match(text, place)
        assert before is not None
        letter = _LETTER.match(text, before.end())
        if letter is None or letter[1].upper() not in options:
            break
        after = _AFTER.match(text, letter.end())
        assert after is not None
        bracketed = bool(re.search(r"[(\[{*<`\"]\s*$", before[0]))
        ends = bool(_END.match(text, after.end()))
        following = _NEXT.match(text, after.end())
        if not (bracketed or ends):
            if letter[1].islower() or (letter[1] in "AI" and _before_a_word(text, letter.end())):
                break
            if found and not following:
                break
        if found and not (bracketed or ends) and _before_a_word(text, after.end()):
            break  # "C, A is wrong" names one option
        found.add(letter[1].upper())
        if following is None:
            break
        place = following.end()
    return frozenset(found)


def _before_a_word(text: str, place: int) -> bool:
    """Return whether a word follows after spaces, and not `and`, `or` or a single capital."""
    return bool(re.compile(r"[ \t]+(?!(?:and|or)\b|[A-Z]\b)\w").match(text, place))


def _text_of(field: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the option whose text a field is; an empty set if it is none or that of several."""
    field = _plain(field)
    found = {letter for letter, text in options.items() if field and _plain(text) == field}
    return frozenset(found) if len(found) == 1 else frozenset()


def _alone(line: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the option that a line consists of: `C`, `(c)`, `**C.**`, `C) Paris` or `Paris`."""
    match = re.fullmatch(r"[\s*_`\"'(\[$#>-]*([A-Za-z])\s*([).:\]*_`\"'$]*)(.*)", line.strip())
    if match and match[1].upper() in options:
        rest = match[3].strip(" \t*_`\"'.")
        if not rest or (match[2].strip("*_`\"'$") and not match[3][:1].isalnum()):
            return frozenset({match[1].upper()})
    return _text_of(line, options)


def _short_lines(text: str) -> Iterator[str]:
    """Return the lines that are not blank and have at most MAX_LINE_CHARS characters."""
    return (line for line in text.splitlines() if line.strip() and len(line) <= MAX_LINE_CHARS)


def _line_at(text: str, place: int) -> str:
    """Return the rest of the line from a place on, up to the end of an answer's tag."""
    end = text.find("\n", place)
    line = text[place : len(text) if end < 0 else end][:MAX_LINE_CHARS]
    return line.partition("</answer>")[0]


def _plain(text: str) -> str:
    """Return a text for comparison: compatible form, small letters, one space between words, no
    punctuation at its ends."""
    text = " ".join(unicodedata.normalize("NFKC", text[: 4 * MAX_LINE_CHARS]).casefold().split())
    return text.strip(" .,;:!?*_`\"'()[]{}$")
