"""Results of tools, cut to a limit, with a note of what was cut."""

from __future__ import annotations

from roll.data.chat.templates import PromptTokenizer

CHARACTERS_PER_TOKEN = 4
"""Characters that stand for a token where there is no tokenizer."""
MOST_CHARACTERS_PER_TOKEN = 32
"""A text that is longer than this many characters for each token allowed is cut before it is
tokenized: to tokenize ten megabytes takes seconds."""


def cut_to(text: str, limit: int, tokenizer: PromptTokenizer | None) -> str:
    """Return a text of at most `limit` tokens and, if it was cut, a note in its middle.

    The beginning and the end are kept. Without a tokenizer a token is taken as four characters.
    """
    if tokenizer is None:
        most = CHARACTERS_PER_TOKEN * limit
        return text if len(text) <= most else _noted(text, most - most // 4, most // 4)
    most = MOST_CHARACTERS_PER_TOKEN * limit
    if len(text) <= limit // 4 or (len(text) <= most and _count(text, tokenizer) <= limit):
        return text
    head, tail = limit - limit // 4, limit // 4
    first = _fitting(text[:most], head, tokenizer, at_end=False)
    last = _fitting(text[-most:], tail, tokenizer, at_end=True)
    return _noted(text, min(first, len(text)), min(last, len(text) - min(first, len(text))))


def _noted(text: str, first: int, last: int) -> str:
    """Return the first and last characters of a text with a note between them."""
    left_out = len(text) - first - last
    if left_out <= 0:
        return text
    return f"{text[:first]}\n[... {left_out} characters left out ...]\n{text[len(text) - last :]}"


def _fitting(text: str, limit: int, tokenizer: PromptTokenizer, *, at_end: bool) -> int:
    """Return how many characters from the beginning, or from the end, make at most `limit` tokens;
    found by halving, because not every tokenizer tells which characters a token stands for."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        part = text[len(text) - middle :] if at_end else text[:middle]
        if _count(part, tokenizer) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def _count(text: str, tokenizer: PromptTokenizer) -> int:
    """Return the number of tokens of a text."""
    return len(tokenizer([text], add_special_tokens=False)["input_ids"][0])
