"""Settings of sampling that an engine cannot follow, and what to do; for runs, evaluations and
chats."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.sections.sampling import SamplingConfig
from roll.config.sections.strategy import EngineConfig, SglangConfig


def engine_sampling_problems(
    key: str, sampling: SamplingConfig, role: str, strategy: EngineConfig
) -> Iterator[str]:
    """Yield the settings that an engine cannot follow, one line each, `key: problem and reason`.

    Args:
        key: key of the sampling in the file.
        role: key of the role whose engine it is.
        strategy: engine of the role.
    """
    engine = f"{role}.strategy.kind = {strategy.kind}"
    if isinstance(strategy, SglangConfig) and sampling.ignore_eos and sampling.stop_token_ids:
        yield (
            f"{key}.stop_token_ids: with {engine}, {key}.ignore_eos ignores these tokens, too; "
            "drop one of both, or use vllm or hf"
        )
