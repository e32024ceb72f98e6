"""Search for text that a tokenizer does not know and replaces by an unknown token or drops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from roll.data.chat.templates import PromptTokenizer

SHOWN = 5
"""Largest number of examples in a message."""


@dataclass
class UnknownText:
    """Record of the text in the rows of a source that the tokenizer does not know."""

    instead: str | None
    """Text that the model reads instead; None if it reads nothing."""
    rows: int = 0
    """Number of rows with such text."""
    first: str = ""
    """File and row of the first row with such text."""
    examples: list[str] = field(default_factory=list)

    def note(self, pieces: Sequence[str], place: str) -> None:
        """Record the unknown pieces of a row; nothing happens if there are none."""
        if not pieces:
            return
        self.rows += 1
        self.first = self.first or place
        for piece in pieces:
            if len(self.examples) < SHOWN and piece not in self.examples:
                self.examples.append(piece)

    def told(self, of: int) -> str:
        """Return a sentence for the log about the affected rows among `of` rows; `of` is above
        0."""
        read = "nothing" if self.instead is None else repr(self.instead)
        shown = ", ".join(map(repr, self.examples))
        return (
            f"{self.rows} of {of} rows ({self.rows / of:.1%}) hold text that the tokenizer does "
            f"not know, and the model reads {read} in its place: {shown} (first: {self.first})"
        )


def unknown_pieces(
    texts: Sequence[str], tokens: Sequence[Sequence[int]], tokenizer: PromptTokenizer
) -> list[list[str]]:
    """Return the characters or words of each text that its tokens do not represent, in order.

    Args:
        texts: texts that were tokenized.
        tokens: tokens of each text, as the tokenizer returned them.
        tokenizer: tokenizer that returned the tokens.
    """
    unk, lost = tokenizer.unk_token_id, _lost_characters(texts, tokenizer)
    found: list[list[str]] = [[] for _ in texts]
    suspects = [
        i
        for i, (text, ids) in enumerate(zip(texts, tokens, strict=True))
        if (unk is not None and unk in ids) or (lost and not lost.isdisjoint(text))
    ]
    if not suspects:
        return found
    if unk is None or not tokenizer.is_fast:
        # No token marks the lost text, so only lost characters can be reported.
        added = _added(tokenizer)
        for i in suspects:
            found[i] = [c for c in added.sub(" ", texts[i]) if c in lost]
        return found
    encoded = tokenizer(
        [texts[i] for i in suspects], add_special_tokens=False, return_offsets_mapping=True
    )
    told = zip(suspects, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    for i, ids, spans in told:
        found[i] = _of_text(texts[i], ids, spans, tokenizer)
    return found


def _added(tokenizer: PromptTokenizer) -> re.Pattern[str]:
    """Return a pattern of the added tokens, which are known even if their characters are not."""
    longest_first = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _of_text(
    text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]], tokenizer: PromptTokenizer
) -> list[str]:
    """Return the words in spans of unknown tokens and the words in no span, in order.

    Args:
        ids: tokens of the text.
        spans: begin and end of each token in the text, in characters.
    """
    pieces, done = [], 0
    for token, (start, stop) in zip(ids, spans, strict=True):
        if start > done:
            pieces += text[done:start].split()
        if token == tokenizer.unk_token_id and text[start:stop] != tokenizer.unk_token:
            pieces += text[start:stop].split()
        done = max(done, stop)
    return pieces + text[done:].split()


def _lost_characters(texts: Sequence[str], tokenizer: PromptTokenizer) -> set[str]:
    """Return the characters that, tokenized alone, give the unknown token or no token."""
    characters = sorted(c for c in set().union(*texts) if not c.isspace())
    if not characters:
        return set()
    encoded = tokenizer(characters, add_special_tokens=False)["input_ids"]
    unk = tokenizer.unk_token_id
    return {c for c, ids in zip(characters, encoded, strict=True) if not ids or unk in ids}
