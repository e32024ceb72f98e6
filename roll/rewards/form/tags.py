"""Tags such as `<think>...</think>` in a response: in order, and each once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_WORD = re.compile(r"\w")


def in_order_and_once(
    response: str, tags: Sequence[str], *, prompt: str = "", text_between: bool = False
) -> bool:
    """Return whether a response consists of these tags, in order, each once, none in another, none
    empty, and of nothing else than white space.

    A tag in other case or with spaces (`<Think >`) counts as this tag and is not in order, so that
    it cannot hide a second one.

    Args:
        response: text with all its tags.
        tags: names without brackets, at least one.
        prompt: text of the prompt; if it ends with the first opening tag, the response begins in
            it.
        text_between: True allows text outside of the tags.
    """
    opening = f"<{tags[0]}>"
    if prompt.rstrip().endswith(opening) and not response.lstrip().startswith(opening):
        response = opening + response
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    found = list(_pattern(tuple(tags)).finditer(response))
    if [mark[0] for mark in found] != marks:
        return False
    ends = [0, *(mark.end() for mark in found)]
    starts = [*(mark.start() for mark in found), len(response)]
    pieces = [response[end:start] for end, start in zip(ends, starts, strict=True)]
    outside, inside = pieces[::2], pieces[1::2]
    return all(_WORD.search(piece) for piece in inside) and (
        text_between or not any(piece.strip() for piece in outside)
    )


@lru_cache(maxsize=64)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of these tags in any case and with a few spaces."""
    names = "|".join(map(re.escape, tags))
    return re.compile(rf"<\s{{0,8}}/?\s{{0,8}}(?:{names})\s{{0,8}}/?>", re.IGNORECASE)
