"""Settings of sampling."""

from typing import Annotated

from pydantic import Field

from roll.config.base import Config

TokenId = Annotated[int, Field(ge=0)]
"""Number of a token in the tokenizer's vocabulary."""


class SamplingConfig(Config):
    """Sampling of the responses."""

    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy. The trainer computes log-probs at the same temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the tokens to sample from. Below 1, the engine samples from a truncated
    distribution that the trainer does not model; the metrics `mismatch/` show the difference."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of likeliest tokens to sample from; -1 means all. Any other value causes a mismatch,
    as `top_p` does."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Longest response, in tokens. A longer response is cut off and marked as truncated."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end a response, by their ids, beside the model's end-of-sequence token. As that
    one, the token stays in the response and is trained; its text too, unless it is a special
    token."""
    ignore_eos: bool = False
    """Ignore the end-of-sequence token and always write `max_new_tokens` tokens (for
    benchmarks)."""

    @property
    def is_greedy(self) -> bool:
        """True if every sample of a prompt is the likeliest one."""
        return self.temperature == 0 or self.top_k == 1
