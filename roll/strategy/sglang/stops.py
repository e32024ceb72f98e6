"""Stop strings, found in tokens.

SGLang could look for them itself, but only by turning every token of every request into text, in a
process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def tokens_to_keep(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], seen: int, stops: Sequence[str]
) -> int | None:
    """How many of `tokens` remain if a response ends with its first stop string; None without one.

    Args:
        tokens: the response so far.
        seen: how many of them were searched before.
    """
    # A token is at least one character, or a quarter of one (UTF-8): none begins before this.
    before = 4 * max(map(len, stops))

    def hit(end: int) -> bool:
        tail = list(tokens[max(0, seen - before) : end])
        text = tokenizer.decode(tail, skip_special_tokens=True)
        return any(stop in text for stop in stops)

    if not hit(len(tokens)):
        return None
    return next(end for end in range(seen + 1, len(tokens) + 1) if hit(end))
