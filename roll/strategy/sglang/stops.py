"""Search for stop strings in tokens.

SGLang itself could search, but only by decoding all tokens of all requests in another process.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def tokens_to_keep(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], seen: int, stops: Sequence[str]
) -> int | None:
    """Return how many of `tokens` to keep so that the response ends with its first stop string.

    Args:
        tokens: the response so far.
        seen: number of leading tokens that were searched before, without success.
        stops: the stop strings; at least one.

    Returns:
        None if there is no stop string.
    """
    # A token has at least one byte, a character at most four (UTF-8). So a stop string that ends in
    # a new token begins at most `before` tokens earlier.
    before = 4 * max(map(len, stops))

    def hit(end: int) -> bool:
        tail = list(tokens[max(0, seen - before) : end])
        text = tokenizer.decode(tail, skip_special_tokens=True)
        return any(stop in text for stop in stops)

    if not hit(len(tokens)):
        return None
    return next(end for end in range(seen + 1, len(tokens) + 1) if hit(end))
