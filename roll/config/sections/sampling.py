"""Settings of sampling, and which of them the trainer or an engine cannot follow."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Protocol

from pydantic import Field

from roll.config.base import Config
from roll.config.sections.engines import EngineConfig, SglangConfig, VllmConfig

TokenId = Annotated[int, Field(ge=0)]
"""Number of a token in the tokenizer's vocabulary."""
StopString = Annotated[str, Field(min_length=1)]
"""String that ends a response. An empty one would end it with its first token, or not be taken."""
LEAST_OF_VLLM = 0.01
"""Lowest temperature above 0 at which vLLM samples."""
LEAST_OF_SGLANG = 1e-6
"""Temperature below which SGLang is greedy."""
RESHAPING = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
"""Settings that no sampling of training may have."""
NOT_TRAINED = (
    "changes the distribution that the engine draws from, and the trainer computes log-probs of "
    "the whole distribution at the temperature, so all ratios would be wrong; leave it out, or set "
    "it in validation.sampling (`roll eval` and `roll chat` take it, too)"
)
"""Why a setting is refused in training, and what to do."""


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
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Share of the likeliest token's probability that a token needs to be sampled from, before
    `top_k` and `top_p` cut; 0 means all tokens. Not in training."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divisor of the logits of tokens that the prompt or the response has already, where they are
    positive; negative ones are multiplied by it (arXiv 1909.05858). 1: none. Not in training."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Number subtracted from the logits of tokens that the response has already (of agents: the
    turn). Not in training."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Number subtracted from the logit of a token for each time that the response has it already
    (of agents: the turn). Not in training."""
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = {}
    """Numbers added to the logits of tokens, by their ids, before the penalties; -100 forbids a
    token, as far as any other one is possible. Not in training."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Longest response, in tokens. A longer response is cut off and marked as truncated."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a response. Its tokens, the one that completes such a string included, stay
    in the response and are trained."""
    stop_in_text: bool = True
    """Leave the stop string that ended a response, and what its last token has behind it, in the
    text that rewards and validation read. The tokens stay the same."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end a response, by their ids, beside the model's end-of-sequence token. As that
    one, the token stays in the response and is trained; its text too, unless it is a special
    token."""
    ignore_eos: bool = False
    """Ignore the end-of-sequence token and always write `max_new_tokens` tokens (for
    benchmarks)."""

    @property
    def reshaping(self) -> list[str]:
        """Names of the settings that change the distribution in a way that a trainer, which knows
        the temperature alone, cannot compute."""
        return self.changed(*RESHAPING)

    @property
    def is_greedy(self) -> bool:
        """True if every sample of a prompt is the likeliest one."""
        return self.temperature == 0 or self.top_k == 1


class Settings(Protocol):
    """Settings that `SamplingConfig` and the parameters of a request have in common."""

    @property
    def temperature(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...


def trained_sampling_problems(key: str, sampling: SamplingConfig) -> Iterator[str]:
    """Yield the settings that no sampling of training may have, one line each; `key` is that of
    the sampling in the file."""
    for name in sampling.reshaping:
        yield f"{key}.{name}: {NOT_TRAINED}"


def engine_sampling_problems(
    key: str, sampling: SamplingConfig, role: str, strategy: EngineConfig
) -> Iterator[str]:
    """Yield the settings that an engine cannot follow, one line each, `key: problem and reason`.

    Args:
        key: key of the sampling in the file.
        role: key of the role whose engine it is.
        strategy: engine of the role.
    """
    if isinstance(strategy, SglangConfig):
        engine = f"with {role}.strategy.kind = sglang"
        for name, why in refused_by_sglang(sampling):
            yield f"{key}.{name}: {engine}, {why}; leave it out, or use vllm or hf"
    elif isinstance(strategy, VllmConfig):
        if 0 < sampling.temperature < LEAST_OF_VLLM:
            yield (
                f"{key}.temperature: vLLM ({role}) samples at {LEAST_OF_VLLM:g} in place of "
                f"{sampling.temperature:g}, and log-probs of the trainer would be of another "
                f"distribution; use {LEAST_OF_VLLM:g} or more, or 0 where greedy is allowed"
            )
        for name in sampling.reshaping if strategy.speculation is not None else ():
            yield (
                f"{key}.{name}: with {role}.strategy.speculation, vLLM refuses it or reports "
                "log-probs of another distribution; leave out one of both"
            )


def refused_by_sglang(sampling: Settings) -> Iterator[tuple[str, str]]:
    """Yield name and reason of each setting that SGLang cannot follow as the other engines do."""
    if 0 < sampling.temperature < LEAST_OF_SGLANG:
        yield "temperature", f"less than {LEAST_OF_SGLANG:g} is greedy with log-probs at 1"
    if sampling.min_p > 0:
        yield "min_p", "no request with a seed may have it"
    if sampling.repetition_penalty != 1:
        yield "repetition_penalty", "tokens of the prompt would not be penalized"
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) != 0:
            yield name, "a request that is suspended loses the counts of its tokens"
    if sampling.ignore_eos and sampling.stop_token_ids:
        yield "stop_token_ids", "`ignore_eos` ignores these tokens, too"
