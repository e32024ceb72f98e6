"""Tokens of texts, and of texts that stand behind others."""

from __future__ import annotations

from collections.abc import Sequence

from roll.data.chat.templates import PromptTokenizer


def inner_tokens(text: str, tokenizer: PromptTokenizer) -> list[int]:
    """The tokens of a text that stands behind another one.

    Some tokenizers begin every text with a token that its continuation does not have (the "▁" of
    SentencePiece), so the text is tokenized behind an anchor, which is then taken away. An anchor
    will do if no token straddles the border, and if it is of another kind than the text's first
    character: letters go behind the end of a line, the rest behind a letter.
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
        # A tokenizer that changes texts on the way: there is nothing to compare with.
        found = after if found is plain else found
    return found


def ids_of(texts: Sequence[tuple[str, bool]], tokenizer: PromptTokenizer) -> list[list[int]]:
    """Tokens of each text, with the tokenizer's special ones where it says so."""
    ids: list[list[int]] = [[] for _ in texts]
    for special in (False, True):
        chosen = [i for i, (text, begins) in enumerate(texts) if begins == special]
        if chosen:
            found = tokenizer([texts[i][0] for i in chosen], add_special_tokens=special)
            for i, tokens in zip(chosen, found["input_ids"], strict=True):
                ids[i] = list(tokens)
    return ids


def _text(tokens: list[int], tokenizer: PromptTokenizer) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
