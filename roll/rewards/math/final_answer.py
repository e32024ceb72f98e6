"""Search for the final answer in a response, and for the ground truth in a data row.

Every function takes time linear in the length of the text. Responses may hold anything, and a
pattern that backtracks would hang on ten thousand opening braces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from roll.rewards.math.notation import plain_characters
from roll.rewards.thinking import final_text

TAIL_CHARS = 20_000
"""Number of characters at the end of a response that are searched for a bare number."""

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[^\n]|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\]+)")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?!\d)"
_NESTED = r"\{(?:[^{}\n]|\{[^{}\n]{0,40}\}){1,60}\}"
_FRAC = rf"\\[dtc]?frac(?:\d\d|(?:\d|{_NESTED})\s?(?:\d|{_NESTED}))"
_PART = r"(?:\\[dtc]?frac(?:\{\d+\}\{\d+\}|\d\d)|\d+/\d+)"
_MIXED = r"\d{1,3}(?!\d)(?: ?\\[dtc]?frac(?:\{\d+\}\{\d+\}|\d\d)| \d+/\d+)"
_REPEATING = r"\d*\.\d*(?:\\(?:overline|bar|dot)\{\d+\}|\(\d+\))"
_ROOT = r"(?:\d+(?:\.\d+)?)?\\sqrt(?:\[\d\])?\{[^{}\n]{1,40}\}"
_AFTER = (
    r"(?:_\{?\d{1,2}\}?)?(?:\\?%)?(?: ?(?:[ap]\.?m\b\.?|[AP]\.?M\b\.?))?"
    r"(?:\s+(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial)s?\b)*"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[!,])(?=\d{3}(?!\d))")
"""Separators of thousands in LaTeX: `12{,}345`, `12,\\!345` and `12\\,345`."""
_TEN_TO = r"(?: {0,2}(?:\\times|\\cdot|\*) {0,2}10\^(?:\{[-+]?\d{1,3}\}|[-+]?\d{1,3}))"
_VALUE = (
    rf"(?:{_ROOT}|{_REPEATING}|\d{{1,2}}:\d\d(?::\d\d)?(?!\d)|{_MIXED}|{_FRAC}|{_PART}"
    rf"|{_WHOLE}(?:\.\d+)?(?:{_TEN_TO}|(?:[eE][-+]?\d+)?(?:/\d+)?))"
)
_NUMBER = re.compile(rf"(?<![\w.)}}])[-+]?\$?{_VALUE}{_AFTER}|{_VALUE}{_AFTER}")


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """Final answer of a response."""

    text: str | None
    """Text of the answer; None if nothing in the response looks like an answer."""
    boxed: bool
    """True if the answer is the content of a box; see `last_box`."""


def find_answer(response: str, *, prompt: str = "", truncated: bool = False) -> FoundAnswer:
    r"""Return the last box of a response, else its last `####` line, else its last number.

    Only the text after the thoughts is searched, also if the prompt opens the thought. A number in
    a thought that does not end is no answer.

    Args:
        response: text of the response.
        prompt: text of the prompt as the chat template renders it; may end inside a thought.
        truncated: True if the response was cut at its token limit. Then its last number, and a
            `####` line without an end, are no answer, but a box is.

    Example: find_answer("so \\boxed{\\frac{1}{2}}.") == FoundAnswer("\\frac{1}{2}", boxed=True)
    """
    final = final_text(response, prompt=prompt)
    if final is None:
        return FoundAnswer(None, boxed=False)
    box = last_box(final)
    if box is not None:
        return FoundAnswer(box, boxed=True)
    hashes = _HASHES.findall(final[: final.rfind("\n") + 1] if truncated else final)
    if hashes:
        return FoundAnswer(hashes[-1].strip(), boxed=False)
    if truncated:
        return FoundAnswer(None, boxed=False)
    tail = _THOUSANDS.sub(",", plain_characters(final[-TAIL_CHARS:]))
    numbers = _NUMBER.findall(tail)
    return FoundAnswer(numbers[-1].strip() if numbers else None, boxed=False)


def find_truth(answer: str) -> str:
    """Return the ground truth in the answer of a data row: the text after the last `####`, else the
    content of the last box, else the whole answer."""
    hashes = _HASHES.findall(answer)
    if hashes:
        return str(hashes[-1]).strip()
    box = last_box(answer)
    return (answer if box is None else box).strip()


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`, with balanced braces.

    Without one, returns the word after the last `\boxed` without braces; else None.
    """
    open_braces: list[int] = []  # start of the content of a box, or -1 for any other brace
    found: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text):
        piece = token.group()
        if piece == "{":
            open_braces.append(-1)
        elif piece == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0:
                found = (start, token.start())
        elif piece.endswith("{") and len(piece) > 2:
            open_braces.append(token.end())
    if found is not None:
        return text[found[0] : found[1]].strip()
    bare = _BARE_BOX.findall(text)
    return bare[-1].strip() if bare else None
