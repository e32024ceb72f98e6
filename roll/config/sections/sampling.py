"""How responses are sampled."""

from pydantic import Field

from roll.config.base import Config


class SamplingConfig(Config):
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy. The trainer's log-probs use the same temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1 the engine samples from a cut distribution that the trainer does not know; the
    difference shows up in `mismatch/`."""
    top_k: int = Field(default=-1, ge=-1)
    """-1 keeps all; like `top_p`, anything else is a mismatch."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Longest response; longer ones are cut and marked as truncated."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    ignore_eos: bool = False
    """Write on to `max_new_tokens` in any case (benchmarks)."""
