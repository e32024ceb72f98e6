"""Rules between opponents and environments; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.agentic_base import AgenticBase
from roll.config.errors import nearest
from roll.config.sections.strategy import SglangConfig, VllmConfig


def opponent_problems(config: AgenticBase) -> Iterator[str]:
    """Yield opponents that are unknown, that no environment names, or whose engines cannot play."""
    known = ", ".join(config.opponents) or "none"
    named = set[str]()
    for name, environment in config.environments.items():
        opponent = environment.opponent
        if opponent is not None and opponent not in config.opponents:
            yield (
                f"environments.{name}.opponent: no opponent {opponent!r}"
                f"{nearest(opponent, config.opponents)} (opponents: {known})"
            )
        named |= {opponent} if opponent else set()
    for name, role in config.opponents.items():
        if name not in named:
            yield f"opponents.{name}: no environment names it (`opponent`); add one, or drop it"
        if role.every is not None and config.train_model.serves_adapter:
            yield (
                f"opponents.{name}.every: an opponent gets the merged weights; set "
                "model.lora.serve to merged, or give it a `model`"
            )
        strategy = role.strategy
        limit = strategy.max_model_len if isinstance(strategy, VllmConfig | SglangConfig) else None
        if limit is not None and limit < config.max_sequence_tokens:
            yield (
                f"opponents.{name}.strategy.max_model_len: {limit} is less than the "
                f"{config.max_sequence_tokens} tokens of data.max_episode_tokens"
            )
