"""`check_backend`: a look whether the backend of a role is installed."""

from __future__ import annotations

from roll.config.sections.engines import EngineConfig, SglangConfig
from roll.config.sections.strategy import ScoreStrategyConfig
from roll.strategy.available import check_engine
from roll.strategy.sglang.interpreter import check_sglang


def check_backend(strategy: ScoreStrategyConfig | EngineConfig) -> None:
    """Raise EngineMissingError unless the backend is installed in a supported version."""
    if isinstance(strategy, SglangConfig):
        check_sglang(strategy.python)
    else:
        check_engine(strategy.kind)
