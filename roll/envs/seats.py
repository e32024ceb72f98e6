"""Players of an episode that the policy plays against itself, each in a conversation of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.envs.api import without_package


@dataclass
class Seats:
    """Record of the players that have had a turn in an episode; a player is a number from 0 on."""

    count: int
    """Number of players."""
    current: int = 0
    """Player whose turn it is."""
    turns: int = 0
    """Number of turns so far, of all players."""
    _last: dict[int, int | None] = field(default_factory=dict, init=False)
    """Last token of the latest turn of each player that has begun, in the order in which they
    began; None if the turn was cut, or there was none."""
    _rows: dict[int, int] = field(default_factory=dict, init=False)
    """Row in which each of them writes."""
    _begun: int = field(default=0, init=False)
    """Number of rows that have begun, of all players."""

    def begins(self, info: Mapping[str, Any]) -> bool:
        """Read who has the next turn; return whether it is the first one of this player.

        Raises:
            ValueError: `info["seat"]` is no player of this episode.
        """
        seat = without_package(info.get("seat", 0))
        if self.count == 1 and not isinstance(seat, int):
            seat = 0  # of environments of others, where it means something else
        if isinstance(seat, bool) or not isinstance(seat, int) or not 0 <= seat < self.count:
            raise ValueError(
                f"info['seat'] = {seat!r:.40} is none of the {self.count} players (`seats` of the "
                "environment), which count from 0"
            )
        self.current = seat
        first = seat not in self._last
        self._last.setdefault(seat, None)
        if first:
            self.begin_row()
        return first

    def begin_row(self) -> None:
        """Let the current player go on in a new row."""
        self._rows[self.current] = self._begun
        self._begun += 1

    def wrote(self, last: int | None) -> None:
        """Keep the last token of a turn of the current player; None if it was cut."""
        self._last[self.current] = last
        self.turns += 1

    @property
    def last(self) -> int | None:
        """Last token of the latest turn of the current player."""
        return self._last[self.current]

    @property
    def row(self) -> int:
        """Row in which the current player writes; rows count in the order of their beginnings."""
        return self._rows[self.current]

    def rewards(self, info: Mapping[str, Any]) -> dict[int, float]:
        """Return what other players than the one who acted get for a turn, by player.

        Raises:
            ValueError: `info["rewards"]` does not map players to finite numbers, or names the one
                who acted, whose reward `step` returns.
        """
        found = info.get("rewards", {}) if self.count > 1 else {}
        if not isinstance(found, Mapping):
            raise ValueError(f"info['rewards'] must map players to numbers, found {found!r:.60}")
        for seat, reward in found.items():
            if seat not in range(self.count) or not math.isfinite(reward):
                raise ValueError(
                    f"info['rewards'] gives player {seat!r:.40} {reward!r:.40}; expected players "
                    f"0 to {self.count - 1}, and finite numbers"
                )
        if self.current in found:
            raise ValueError(
                f"info['rewards'] gives player {self.current}, who acted, {found[self.current]!r}; "
                "name the other players alone there: whoever acted gets the reward that step "
                "returns"
            )
        return {int(seat): float(reward) for seat, reward in found.items()}
