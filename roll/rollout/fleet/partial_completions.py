"""Partial completions of a request, and the requests for their remaining tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from roll.core.completion import (
    LOGPROB_TYPE,
    TOKEN_TYPE,
    Completion,
    FinishReason,
    VersionRuns,
)
from roll.core.types import GenerateRequest, Piece, SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Function that turns tokens into text."""
NOTHING = Completion.of((), (), (), FinishReason.ABORT)
TOKENS_PER_CHARACTER = 4
"""Largest number of tokens of one character: a character has at most 4 bytes in UTF-8, and a token
may be a single byte."""
CUT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""Text of tokens that are only a part of a character."""


class KnownTokens:
    """Tokens of one sibling that are known from heartbeats: its beginning, without a gap.

    A heartbeat that timed out has lost its pieces. All pieces after such a gap are dropped, also
    the one with the end of the sibling, because the sibling can only continue from before the gap.

    The tokens are in arrays that grow. To join completions at every heartbeat would cost the square
    of their length.
    """

    __slots__ = ("_finish", "_logprobs", "_tokens", "_versions")

    def __init__(self) -> None:
        self._tokens: array[int] = array(TOKEN_TYPE)
        self._logprobs: array[float] = array(LOGPROB_TYPE)
        self._versions = VersionRuns()
        self._finish = FinishReason.ABORT

    def add(self, news: Piece) -> None:
        """Append a piece; if its beginning is known already, append only the rest."""
        new = news.written
        known = len(self._tokens) - news.start
        if known < 0 or known > len(new):  # a gap, or an older piece that was sent again
            return
        self._finish = new.finish
        if len(new) > known:
            if known:
                new = new.part(known)
            self._tokens.extend(new.tokens)
            self._logprobs.extend(new.logprobs)
            self._versions += new.versions

    def so_far(self) -> Completion:
        """Return a copy of the tokens known so far; its finish is ABORT unless the end is known."""
        return Completion.of(self._tokens[:], self._logprobs[:], self._versions, self._finish)


def continuable_part(
    written: Completion, sampling: SamplingParams, decode: Decode | None = None
) -> Completion:
    """Return the part of a completion from which another replica may continue.

    A finished completion is returned as it is. One with `max_new_tokens` tokens ends with LENGTH.

    A grammar begins with the first token that an engine writes, and penalties count from there, so
    nothing is kept then.

    An engine finds stop strings only in the tokens that it writes itself. So that no stop string
    can lie across the boundary of the two parts, the last tokens are dropped and written again: as
    many as the longest stop string may have, and further ones until what is kept does not end with
    the beginning of a stop string. Without `decode` that is not known, so nothing is kept, unless
    the same tokens will be written again (temperature 0).
    """
    if written.finish is not FinishReason.ABORT:
        return written
    if len(written) >= sampling.max_new_tokens:
        return replace(written, finish=FinishReason.LENGTH)
    if sampling.json_schema is not None:  # an engine follows a grammar from its beginning only
        return written.part(0, 0)
    if sampling.presence_penalty or sampling.frequency_penalty:  # prompts do not count
        return written.part(0, 0)
    if not sampling.stop:
        return written
    longest = max(map(len, sampling.stop))
    kept = max(0, len(written) - TOKENS_PER_CHARACTER * longest)
    if sampling.temperature:
        begins = tuple(stop[:end] for stop in sampling.stop for end in range(1, len(stop)))
        begins = (*begins, CUT_CHARACTER)
        while kept and (
            decode is None or _end_of_text(written.tokens[:kept], longest, decode).endswith(begins)
        ):
            kept = kept - 1 if decode else 0
    return written.part(0, kept)


def _end_of_text(tokens: Sequence[int], least: int, decode: Decode) -> str:
    """Return the end of the text of tokens, more than `least` characters if there are so many. To
    decode all tokens would take long."""
    width = TOKENS_PER_CHARACTER * (least + 1)
    while True:
        text = decode(tokens[-width:])
        if len(text) > least or width >= len(tokens):
            return text
        width *= 2


@dataclass(frozen=True, slots=True)
class MovedSibling:
    """Sibling of a request that goes on as a request of its own on another replica."""

    request: GenerateRequest
    """Request as it was asked first."""
    sibling: int
    """Place among the siblings of `request`."""
    kept: Completion
    """Tokens that are kept."""

    @property
    def rest(self) -> GenerateRequest:
        """Request for the remaining tokens."""
        return remaining_request(self.request, self.sibling, self.kept)

    def named(self, name: str) -> GenerateRequest:
        """Return the request as it was asked first, with another name. No name comes twice, though
        a sibling moves several times."""
        return replace(self.request, id=name)


def remaining_request(
    request: GenerateRequest, sibling: int, written: Completion
) -> GenerateRequest:
    """Return the request for the remaining tokens of one sibling.

    The prompt of this request ends with the tokens written so far. If there are such tokens, the
    seed is new, because the old seed would repeat the random numbers of the beginning.

    Args:
        request: original request.
        sibling: index of the sibling in `request`.
        written: tokens of the sibling so far.
    """
    count = len(written)
    sampling = request.sampling
    return replace(
        request,
        id=f"{request.id}~{sibling}.{count}",
        prompt_tokens=(*request.prompt_tokens, *written.tokens),
        sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens - count),
        n=1,
        seed=None if request.seed is None else _seed(request.seed + sibling, count),
    )


def _seed(seed: int, count: int) -> int:
    """Return `seed` if `count`, the number of tokens written so far, is 0; else a 48-bit seed
    derived from both."""
    if not count:
        return seed
    digest = hashlib.blake2b(f"{seed}/{count}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
