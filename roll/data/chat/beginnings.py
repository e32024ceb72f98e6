"""Tokens of the beginnings of a text, each as if it were tokenized alone, from one tokenization.

A fast tokenizer first cuts a text at its added tokens, such as `<|im_start|>`, then normalizes and
tokenizes each part between them for itself. So the tokens before an added token do not depend on it
or on what follows. A beginning of a text has these tokens of the whole text, and those of its rest
from its last added token on, which is tokenized again: a few characters in most chat templates.
Other borders between tokens would not do: GPT-2 splits "a  " otherwise when a word follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from roll.data.chat.inner_tokens import ids_of
from roll.data.chat.templates import PromptTokenizer


@dataclass(frozen=True, slots=True)
class Beginning:
    """Tokens of a beginning of a text."""

    shared: int
    """Number of tokens of the whole text with which it begins."""
    rest: Sequence[int]
    """Its tokens behind these."""


class Cut(NamedTuple):
    """Place in a text where an added token begins."""

    token: int
    """Number of this token in the text."""
    char: int
    """Number of its first character."""


def with_beginnings(
    texts: Sequence[str], ends: Sequence[Sequence[int]], tokenizer: PromptTokenizer
) -> Iterator[tuple[list[int], list[Beginning]]]:
    """Yield the tokens of each text, and of some of its beginnings; the tokenizer adds none.

    A beginning without an added token is tokenized from its start, and so is each of a slow
    tokenizer, which does not tell the characters of its tokens.

    Args:
        texts: texts to tokenize.
        ends: number of characters of each wanted beginning of each text, ascending; below that of
            the text.
    """
    if not texts:
        return
    added = _added(tokenizer)
    lean = {"return_attention_mask": False, "return_token_type_ids": False} if added else {}
    encoded = tokenizer(list(texts), add_special_tokens=False, **lean)
    cuts = [
        list(_cuts(i, text, own, encoded, added))
        for i, (text, own) in enumerate(zip(texts, ends, strict=True))
    ]
    # Most are equal, such as "<|im_start|>assistant\n".
    rests = {
        text[cut.char : end]: None
        for text, own, found in zip(texts, ends, cuts, strict=True)
        for end, cut in zip(own, found, strict=True)
    }
    ids = dict(zip(rests, ids_of([(rest, False) for rest in rests], tokenizer), strict=True))
    for text, own, tokens, found in zip(texts, ends, encoded["input_ids"], cuts, strict=True):
        yield (
            tokens,
            [
                Beginning(cut.token, ids[text[cut.char : end]])
                for end, cut in zip(own, found, strict=True)
            ],
        )


def _added(tokenizer: PromptTokenizer) -> dict[str, int]:
    """Return the ids of the tokens at which a text is cut before anything else is done with it;
    none for a slow tokenizer."""
    if not tokenizer.is_fast or tokenizer.split_special_tokens:
        return {}
    tokens = tokenizer.added_tokens_decoder.items()
    return {each.content: i for i, each in tokens if each.content and not each.normalized}


def _cuts(
    number: int, text: str, ends: Iterable[int], encoded: Any, added: dict[str, int]
) -> Iterator[Cut]:
    """Yield the last cut of a beginning up to each end; its start, if it has no added token.

    Args:
        number: number of the text in `encoded`.
        encoded: what the tokenizer has returned.
        added: ids of the added tokens.
    """
    written: Iterator[re.Match[str]] = _any_of(added).finditer(text) if added else iter(())
    following = next(written, None)
    passed: list[re.Match[str]] = []
    for end in ends:
        while following is not None and following.end() <= end:
            passed.append(following)
            following = next(written, None)
        cut = None
        while passed and cut is None:
            cut = _cut(number, passed[-1], end, encoded, added)
            if cut is None:
                passed.pop()
        yield cut or Cut(0, 0)


def _cut(
    number: int, written: re.Match[str], end: int, encoded: Any, added: dict[str, int]
) -> Cut | None:
    """Return the cut at an added token that is written in a text; None if the tokenizer sees
    another one there (it may take whole words only), or takes what follows `end` into it."""
    token = encoded.char_to_token(number, written.start())
    if token is None or encoded["input_ids"][number][token] != added[written[0]]:
        return None
    span = encoded.token_to_chars(number, token)  # with white space, if the token takes any
    return Cut(token, span.start) if span.end <= end else None


def _any_of(added: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of all added tokens."""
    longest_first = sorted(added, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))
