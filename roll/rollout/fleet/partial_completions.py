"""What a request has got so far, and the requests that get the rest from another replica."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from roll.core.types import Completion, FinishReason, GenerateRequest, Piece, SamplingParams

NOTHING = Completion((), (), (), FinishReason.ABORT)
TOKENS_PER_CHARACTER = 4
"""At most: a character is one token or several bytes of UTF-8."""


def joined(first: Completion, then: Completion) -> Completion:
    """Two stretches of one continuation; it ends as the second one does."""
    return Completion(
        first.tokens + then.tokens,
        first.logprobs + then.logprobs,
        first.versions + then.versions,
        then.finish,
    )


class HeardTokens:
    """What heartbeats tell of one sibling, stretch by stretch: always its beginning without a gap.

    A heartbeat that was given up has taken its pieces with it. What comes after such a gap is
    dropped, an end included: the sibling can go on from before the gap, and from nowhere else.

    Lists that grow: joining tuples at every heartbeat would cost the square of their length.
    """

    __slots__ = ("_finish", "_logprobs", "_tokens", "_versions")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._finish = FinishReason.ABORT

    def add(self, news: Piece) -> None:
        """Take in a piece; of one that was heard in part, the rest."""
        known = len(self._tokens) - news.start
        if known < 0:
            return
        written = news.written
        if known > len(written.tokens):  # an older one, told again
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


def kept(written: Completion, sampling: SamplingParams) -> Completion:
    """What may be continued elsewhere.

    An engine looks for stop strings in what it writes itself. So that none can lie across the
    seam, as many tokens as the longest could have are written again.
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
    """The request for what one sibling still lacks; its prompt ends with what is written.

    Its seed is a new one once something is written: the old one would repeat the random numbers
    of the beginning.
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
    """The sibling's own where nothing is written; else one of 48 bits that follows from both."""
    if not count:
        return seed
    digest = hashlib.blake2b(f"{seed}/{count}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")
