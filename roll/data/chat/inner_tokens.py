"""Tokenization of texts, alone or as the continuation of another text."""

from __future__ import annotations

from collections.abc import Sequence

from roll.data.chat.templates import PromptTokenizer


def inner_tokens(text: str, tokenizer: PromptTokenizer) -> list[int]:
    """Return the tokens of a text that follows another text.

    Some tokenizers begin every text with a token that the middle of a text does not have (the "▁"
    of SentencePiece). The text is therefore tokenized behind an anchor, whose tokens are then
    removed. An anchor is suitable if no token crosses the border and if the anchor is of another
    kind than the first character of the text: a text that begins with a letter or digit gets a line
    end or a symbol as anchor, other texts get a letter or digit first. Without a suitable anchor,
    the result is the tokens of the text alone.
    """
    plain = ids_of([(text, False)], tokenizer)[0]
    found = plain
    for anchor in ("\n", ":", "=") if text[:1].isalnum() else ("a", "0", "x", "\n"):
        before, both = ids_of([(anchor, False), (anchor + text, False)], tokenizer)
        if both[: len(before)] != before:
            continue
        after = both[len(before) :]
        if _text(both, tokenizer) == _text(before, tokenizer) + text:
            return after
        # The tokenizer changes texts, so decoding cannot confirm the tokens: keep the first ones.
        found = after if found is plain else found
    return found


def ids_of(texts: Sequence[tuple[str, bool]], tokenizer: PromptTokenizer) -> list[list[int]]:
    """Tokenize each text, with special tokens of the tokenizer if requested.

    Args:
        texts: pairs of a text and True if the tokenizer adds its special tokens.
        tokenizer: tokenizer to use.
    """
    ids: list[list[int]] = [[] for _ in texts]
    for special in (False, True):
        chosen = [i for i, (text, begins) in enumerate(texts) if begins == special]
        if chosen:
            found = tokenizer([texts[i][0] for i in chosen], add_special_tokens=special)
            for i, tokens in zip(chosen, found["input_ids"], strict=True):
                ids[i] = list(tokens)
    return ids


def _text(tokens: list[int], tokenizer: PromptTokenizer) -> str:
    """Decode tokens to text, without a change of its spaces."""
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
