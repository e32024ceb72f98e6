"""Settings of sampling that the trainer or an engine cannot follow, and what to do; for runs,
evaluations and chats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from roll.config.sections.sampling import NOT_TRAINED, SamplingConfig
from roll.config.sections.strategy import EngineConfig, SglangConfig, VllmConfig


class Settings(Protocol):
    """Settings that `SamplingConfig` and the parameters of a request have in common."""

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
    elif isinstance(strategy, VllmConfig) and strategy.speculation is not None:
        for name in sampling.reshaping:
            yield (
                f"{key}.{name}: with {role}.strategy.speculation, vLLM refuses it or reports "
                "log-probs of another distribution; leave out one of both"
            )


def refused_by_sglang(sampling: Settings) -> Iterator[tuple[str, str]]:
    """Yield name and reason of each setting that SGLang cannot follow as the other engines do."""
    if sampling.min_p > 0:
        yield "min_p", "no request with a seed may have it"
    if sampling.repetition_penalty != 1:
        yield "repetition_penalty", "tokens of the prompt would not be penalized"
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, name) != 0:
            yield name, "a request that is suspended loses the counts of its tokens"
    if sampling.ignore_eos and sampling.stop_token_ids:
        yield "stop_token_ids", "`ignore_eos` ignores these tokens, too"
