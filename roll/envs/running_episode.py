"""`RunningEpisode`: an environment that runs in a host, and who plays there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll.core.threads.pauses import Pauses
from roll.core.types import Message
from roll.envs.api import Env
from roll.envs.contexts import Context
from roll.envs.seats import Seats


@dataclass(eq=False)
class Player:
    """Conversation of a player."""

    tools: Any
    """Tools that it began with."""
    said: list[Message]
    """All messages of the present context; with `history: keep` only those that began it."""
    context: Context | None
    """Context that the chat template may rewrite; None with `history: keep`."""


@dataclass(eq=False)
class RunningEpisode:
    """Environment that runs, and who plays there."""

    env: Env
    seats: Seats
    searches: Pauses
    """Searches in corpora of the run, whose time is not that of the environment."""
    prompt_end: str = ""
    """End of the text before the next turn."""
    players: dict[int, Player] = field(default_factory=dict)

    @property
    def player(self) -> Player:
        """Conversation of the player whose turn it is."""
        return self.players[self.seats.current]
