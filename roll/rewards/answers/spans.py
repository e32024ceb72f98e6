"""Search for the short answer in a response: in a tag, in a box, after "answer:", or all of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from roll.rewards.math.final_answer import last_box

Place = Literal["auto", "tag", "box", "line", "all"]
"""Places of an answer; see `find_span`."""

_STATED = re.compile(
    r"(?:\banswer\b\**[ \t]*(?:is\b|[:=\uff1a])[ \t]*[:\uff1a]?|####)\**[ \t]*",
    re.IGNORECASE,
)
_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class Span:
    """Answer that was found."""

    text: str
    formatted: bool
    """True if a tag or a box marked it."""


def find_span(final: str, place: Place = "auto", *, truncated: bool = False) -> Span | None:
    r"""Return the answer in a response; None if it is not at its place.

    Args:
        final: text after the thoughts.
        place: `tag`: the content of the last `<answer>...</answer>`; `box`: that of the last
            `\boxed{...}`; `line`: the rest of the last line after "answer:", "the answer is" or
            `####`; `all`: the whole text. `auto` tries these in this order.
        truncated: True if the response was cut at its token limit. Then only a tag or a box is an
            answer.
    """
    if place in ("auto", "tag") and (tagged := _last_tag(final)) is not None:
        return Span(tagged, True)
    if place in ("auto", "box") and (box := last_box(final)) is not None:
        return Span(_COMMAND.sub("", box).replace("{", "").replace("}", ""), True)
    if truncated or place in ("tag", "box"):
        return None
    if place in ("auto", "line"):
        ends = [stated.end() for stated in _STATED.finditer(final)]
        if ends:
            return Span(final[ends[-1] :].lstrip().partition("\n")[0].strip(" *"), False)
    return None if place == "line" else Span(final.strip(), False)


def _last_tag(text: str) -> str | None:
    """Return the content of the last complete `<answer>` tag; None if there is none."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None
