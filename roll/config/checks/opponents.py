"""Rules between opponents and environments; see `roll.config.checks.common`."""

from __future__ import annotations

from collections.abc import Iterator

from roll.config.agentic_base import AgenticBase
from roll.config.errors import nearest


def opponent_problems(config: AgenticBase) -> Iterator[str]:
    """Yield opponents that are unknown, or that no environment names."""
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
