"""Text that a tokenizer does not know: the model reads something else in its place, or nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from roll.data.chat.templates import PromptTokenizer

SHOWN = 5


@dataclass
class UnknownText:
    """What the rows of a source hold that the tokenizer does not know."""

    instead: str | None
    """What the model reads in its place; None: nothing."""
    rows: int = 0
    first: str = ""
    """Place of the first such row."""
    examples: list[str] = field(default_factory=list)

    def note(self, pieces: Sequence[str], place: str) -> None:
        """Count a row."""
        if not pieces:
            return
        self.rows += 1
        self.first = self.first or place
        for piece in pieces:
            if len(self.examples) < SHOWN and piece not in self.examples:
                self.examples.append(piece)

    def told(self, of: int) -> str:
        """For people: how many of so many rows, and which."""
        read = "nothing" if self.instead is None else repr(self.instead)
        shown = ", ".join(map(repr, self.examples))
        return (
            f"{self.rows} of {of} rows ({self.rows / of:.1%}) hold text that the tokenizer does "
            f"not know, and the model reads {read} in its place: {shown} (first: {self.first})"
        )


def unknown_pieces(
    texts: Sequence[str], tokens: Sequence[Sequence[int]], tokenizer: PromptTokenizer
) -> list[list[str]]:
    """What each text holds that is lost in its tokens: characters or words, in order.

    Args:
        tokens: of each text, as the tokenizer gave them.
    """
    unk, lost = tokenizer.unk_token_id, _lost_characters(texts, tokenizer)
    found: list[list[str]] = [[] for _ in texts]
    suspects = [
        i
        for i, (text, ids) in enumerate(zip(texts, tokens, strict=True))
        if (unk is not None and unk in ids) or not lost.isdisjoint(text)
    ]
    if not suspects:
        return found
    if unk is None or not tokenizer.is_fast:
        # No token stands for what is lost.
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
    """What finds added tokens, which are known whatever they are spelled with."""
    longest_first = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _of_text(
    text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]], tokenizer: PromptTokenizer
) -> list[str]:
    """Spans of unknown tokens, and what lies in no span."""
    pieces, done = [], 0
    for token, (start, stop) in zip(ids, spans, strict=True):
        if start > done:
            pieces += text[done:start].split()
        if token == tokenizer.unk_token_id and text[start:stop] != tokenizer.unk_token:
            pieces += text[start:stop].split()
        done = max(done, stop)
    return pieces + text[done:].split()


def _lost_characters(texts: Sequence[str], tokenizer: PromptTokenizer) -> set[str]:
    """Characters that become the unknown token, or no token at all, where they stand alone."""
    characters = sorted(c for c in set().union(*texts) if not c.isspace())
    if not characters:
        return set()
    encoded = tokenizer(characters, add_special_tokens=False)["input_ids"]
    unk = tokenizer.unk_token_id
    return {c for c, ids in zip(characters, encoded, strict=True) if not ids or unk in ids}
