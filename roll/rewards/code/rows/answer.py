"""The program in a response: in its last fenced block, or the whole text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roll.rewards.code.running.languages import LANGUAGES

_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^\s`{]*)[^`\n]*$")
_MOST_INDENT = 3
"""Spaces that a closing fence may be indented more than the opening one; as in CommonMark. A fence
in a docstring of a function is indented more, and ends nothing."""
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    label: str
    """First word after the opening fence in lower case; empty if there is none."""
    text: str


def program_of(final: str, language: str) -> str | None:
    """Return the program that the text of a response gives; None if it gives none.

    It is the last fenced block that is labelled with the language, else the last one without a
    label. A block that is not closed reaches to the end of the text. Without any block the text
    itself is the program, or what is between its last <answer> tags.

    Args:
        final: text after the thoughts.
        language: key of `LANGUAGES`.
    """
    found = list(blocks(final))
    if not found:
        tagged = _ANSWER.findall(final)
        text = tagged[-1] if tagged else final
        return text.strip("\n") if text.strip() else None
    labels = LANGUAGES[language].labels
    for wanted in (labels, ("",)):
        texts = [block.text for block in found if block.label in wanted and block.text.strip()]
        if texts:
            return texts[-1]
    return None


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a text, in order, without the indentation of their fences."""
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = _FENCE.match(line)
        if opened is None:
            if fence:
                opened, lines = fence, []
        elif fence and _closes(fence, opened):
            yield _block(opened, lines)
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        yield _block(opened, lines)


def _closes(fence: re.Match[str], opened: re.Match[str]) -> bool:
    """Return whether a line of backticks or tildes closes the block that `opened` has begun."""
    indent, marks, label = fence.groups()
    return (
        not label
        and marks.startswith(opened[2])
        and len(indent.expandtabs()) <= len(opened[1].expandtabs()) + _MOST_INDENT
    )


def _block(opened: re.Match[str], lines: Sequence[str]) -> Block:
    """Return the block of these lines, without the indentation of the fence `opened`."""
    width = len(opened[1])
    cut = [line[min(width, len(line) - len(line.lstrip())) :] for line in lines]
    return Block(opened[3].lower(), "\n".join(cut))
