"""Tokens of scripted responses: all tokens of one have the same value."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from roll.core.completion import LOGPROB_TYPE, TOKEN_TYPE, Completion, FinishReason, Written

NO_NEWS = {finish: Completion.of((), (), (), finish) for finish in FinishReason}


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """Address of the tokens of a finished response. It takes the place of a `RemoteValue`, so that
    the simulated driver has no tokens in its memory that a real one has not."""

    length: int
    """Value of each token: the length of the whole response."""
    count: int
    """Number of tokens."""

    def get(self) -> Written:
        """Make the tokens anew."""
        tokens, logprobs = array(TOKEN_TYPE, (self.length,)), array(LOGPROB_TYPE, (-1.0,))
        return Written(tokens * self.count, logprobs * self.count)
