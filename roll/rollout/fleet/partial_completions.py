"""Partial completions of a request, and the requests for their remaining tokens."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from roll.core.types import Completion, FinishReason, GenerateRequest, Piece, SamplingParams

NOTHING = Completion((), (), (), FinishReason.ABORT)
TOKENS_PER_CHARACTER = 4
"""Largest number of tokens of one character: a character has at most 4 bytes in UTF-8, and a token
may be a single byte."""


def joined(first: Completion, then: Completion) -> Completion:
    """Concatenate two parts of one completion; the finish reason is that of the second part."""
    return Completion(
        first.tokens + then.tokens,
        first.logprobs + then.logprobs,
        first.versions + then.versions,
        then.finish,
    )


class KnownTokens:
    """Tokens of one sibling that are known from heartbeats: its beginning, without a gap.

    A heartbeat that timed out has lost its pieces. All pieces after such a gap are dropped, also
    the one with the end of the sibling, because the sibling can only continue from before the gap.

    The tokens are in lists that grow. To join tuples at every heartbeat would cost the square of
    their length.
    """

    __slots__ = ("_finish", "_logprobs", "_tokens", "_versions")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._finish = FinishReason.ABORT

    def add(self, news: Piece) -> None:
        """Append a piece; if its beginning is known already, append only the rest."""
        known = len(self._tokens) - news.start
        if known < 0:
            return
        written = news.written
        if known > len(written.tokens):  # an older piece that was sent again
            return
        self._finish = written.finish
        if written.tokens:
            self._tokens.extend(written.tokens[known:])
            self._logprobs.extend(written.logprobs[known:])
            self._versions.extend(written.versions[known:])

    def so_far(self) -> Completion:
        return Completion(
            tuple(self._tokens), tuple(self._logprobs), tuple(self._versions), self._finish
        )


def continuable_part(written: Completion, sampling: SamplingParams) -> Completion:
    """Return the part of a completion from which another replica may continue.

    A finished completion is returned as it is. One with `max_new_tokens` tokens ends with LENGTH.

    An engine finds stop strings only in the tokens that it writes itself. So that no stop string
    can lie across the boundary of the two parts, the last tokens are dropped and written again: as
    many as the longest stop string may have.
    """
    if written.finish is not FinishReason.ABORT:
        return written
    if len(written.tokens) >= sampling.max_new_tokens:
        return replace(written, finish=FinishReason.LENGTH)
    if not sampling.stop:
        return written
    end = max(0, len(written.tokens) - TOKENS_PER_CHARACTER * max(map(len, sampling.stop)))
    return Completion(
        written.tokens[:end], written.logprobs[:end], written.versions[:end], FinishReason.ABORT
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
    count = len(written.tokens)
    sampling = request.sampling
    return GenerateRequest(
        id=f"{request.id}~{sibling}.{count}",
        prompt_tokens=request.prompt_tokens + written.tokens,
        sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens - count),
        n=1,
        seed=None if request.seed is None else _seed(request.seed + sibling, count),
    )


def _seed(seed: int, count: int) -> int:
    """Return `seed` if `count` is 0, else a 48-bit seed derived from `seed` and `count`."""
    if not count:
        return seed
    digest = hashlib.blake2b(f"{seed}/{count}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
