"""Output of `roll chat`: an answer while it is written, and what is known of it afterwards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import fsum

from rich.console import Console
from rich.text import Text

from roll.commands.chat.judging import Verdict
from roll.core.completion import Completion, FinishReason
from roll.rewards.decoding import Decode

UNFINISHED = "�"
"""What a tokenizer writes for a character of which some bytes are still to come."""
ENDS = {
    FinishReason.LENGTH: "[cut off: the longest answer is reached]",
    FinishReason.ABORT: "[stopped]",
}
COLOURS = ((-0.1, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (float("-inf"), "red"))
"""Smallest log-prob of each colour."""


class TextStream:
    """The text of an answer, printed as far as its tokens are known."""

    def __init__(self, out: Console, decode: Decode) -> None:
        self._out, self._decode = out, decode
        self._tokens: list[int] = []
        self._shown = ""

    def take(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Print what these tokens add."""
        self._tokens.extend(tokens)
        self._show(self._decode(self._tokens).rstrip(UNFINISHED))

    def end(self, text: str) -> None:
        """Print what is missing of the whole text, and end the line."""
        self._show(text)
        self._out.out("", highlight=False)

    def _show(self, text: str) -> None:
        """Print the end of a text whose beginning is printed; wait if a later token has changed
        that."""
        if text.startswith(self._shown):
            self._out.file.write(text[len(self._shown) :])
            self._out.file.flush()
            self._shown = text


def logprob_line(pieces: Sequence[str], logprobs: Sequence[float], *, colours: bool) -> Text:
    """Return the tokens of an answer with their log-probs: in colours, or as numbers."""
    mean = fsum(logprobs) / len(logprobs) if logprobs else 0.0
    line = Text("log-probs: ")
    for piece, value in zip(pieces, logprobs, strict=True):
        if colours:
            line.append(piece, next(colour for least, colour in COLOURS if value >= least))
        else:
            line.append(f"{json.dumps(piece, ensure_ascii=False)} {value:.2f}  ")
    if colours:
        line.append("  (")
        for least, colour in COLOURS[:-1]:
            line.append(f"{least:g} or more", colour).append(", ")
        line.append("less", COLOURS[-1][1]).append(")")
    return line.append(f" mean {mean:.3f}")


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a line about each reward."""
    lines = []
    for one in verdicts:
        weight = "" if one.weight == 1 else f", weight {one.weight:g}"
        score = "none" if one.score is None else f"{one.score:.4g}"
        line = f"reward {one.reward}: {score}{weight}"
        if one.parts:
            line += " (" + ", ".join(f"{name} {v:.4g}" for name, v in one.parts.items()) + ")"
        if one.failure is not None:
            line += f"; it failed: {one.failure}"
        lines.append(line)
    return lines


def end_of(completion: Completion) -> str | None:
    """Return why an answer is not whole; None if it is."""
    return ENDS.get(completion.finish)
