"""Partial completions of a request, and the requests for their remaining tokens."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace

from roll.core.completion import (
    LOGPROB_TYPE,
    TOKEN_TYPE,
    Completion,
    FinishReason,
    VersionRuns,
)
from roll.core.types import GenerateRequest, Piece, SamplingParams

NOTHING = Completion.of((), (), (), FinishReason.ABORT)
TOKENS_PER_CHARACTER = 4
"""Largest number of tokens of one character: a character has at most 4 bytes in UTF-8, and a token
may be a single byte."""


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


def continuable_part(written: Completion, sampling: SamplingParams) -> Completion:
    """Return the part of a completion from which another replica may continue.

    A finished completion is returned as it is. One with `max_new_tokens` tokens ends with LENGTH.

    A grammar begins with the first token that an engine writes, and penalties count from there, so
    nothing is kept then.

    An engine finds stop strings only in the tokens that it writes itself. So that no stop string
    can lie across the boundary of the two parts, the last tokens are dropped and written again: as
    many as the longest stop string may have.
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
    return written.part(
        0, max(0, len(written) - TOKENS_PER_CHARACTER * max(map(len, sampling.stop)))
    )


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
