"""Find the final answer in a response, and the ground truth in a data row.

Everything here is linear in the length of the text: responses are hostile by accident, and a
pattern that backtracks would hang on the first ten thousand opening braces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TAIL_CHARS = 20_000
"""How much of the end of a response is searched for a bare number."""

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[^\n]|[{}]")
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\]+)")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_NUMBER = re.compile(
    r"(?<![\w.)}])[-+]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?!\d)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?%?"
    r"|(?:\d{1,3}(?:,\d{3})+|\d+)(?!\d)(?:\.\d+)?(?:/\d+)?%?"
)


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """What a response gives as its answer."""

    text: str | None
    """None: there is nothing that looks like an answer."""
    boxed: bool


def find_answer(response: str) -> FoundAnswer:
    """The answer of a response: the last box, else the last `####` line, else the last number.

    Only what follows the last `</think>` counts. A `<think>` that is never closed means that the
    response was cut in the middle of its thoughts: a number in there is no answer.

    Example: find_answer("so \\boxed{\\frac{1}{2}}.") == FoundAnswer("\\frac{1}{2}", boxed=True)
    """
    final = response.rpartition("</think>")[2]
    if "<think>" in final:
        return FoundAnswer(None, boxed=False)
    box = last_box(final)
    if box is not None:
        return FoundAnswer(box, boxed=True)
    hashes = _HASHES.findall(final)
    if hashes:
        return FoundAnswer(hashes[-1].strip(), boxed=False)
    numbers = _NUMBER.findall(final[-TAIL_CHARS:].replace("\u2212", "-"))
    return FoundAnswer(numbers[-1] if numbers else None, boxed=False)


def find_truth(answer: str) -> str:
    """The ground truth of a data row; that may be a whole solution with `#### 18` or a box."""
    hashes = _HASHES.findall(answer)
    if hashes:
        return str(hashes[-1]).strip()
    box = last_box(answer)
    return (answer if box is None else box).strip()


def last_box(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}` or `\fbox{...}`, braces inside balanced."""
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
