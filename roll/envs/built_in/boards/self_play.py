"""`self_play`: tic-tac-toe or connect four, in which the policy plays both sides."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, Literal

from roll.envs.built_in.boards import connect_four, tic_tac_toe
from roll.envs.built_in.boards.match import MAX_INVALID, OPPONENT, POLICY

MOST_OPENING = 5
"""Largest `opening`: after so few moves each game goes on, and has a move that does not win."""


class SelfPlay:
    """A game between two players, both of whom are the policy; set `seats: 2`.

    Each player sees the board as in the game of the same name against a scripted opponent: its own
    pieces are X. So what is learnt here can be tried there. The reward is 1 for the player who
    wins, -1 for the other. Turns without an allowed move lose, for that player alone: nobody wins
    such a game, so that nobody learns to wait for it.

    Args:
        game: `tic_tac_toe`, or `connect_four` on 6 rows and 7 columns.
        rules: explain the game in the first observation of each player.
        opening: largest number of random moves before the first turn. The seed draws how many and
            which; none of them wins. So the policy meets positions that it would not play itself,
            and all games of a task begin with the same one.
        max_invalid: number of turns without an allowed move that lose. With 1 each such turn counts
            against it; with more of them, all but the last one cost nothing, and a policy that has
            learned of its losses alone may forget the rules.
    """

    def __init__(
        self,
        game: Literal["tic_tac_toe", "connect_four"] = "tic_tac_toe",
        rules: bool = True,
        opening: int = 0,
        max_invalid: int = MAX_INVALID,
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if game not in ("tic_tac_toe", "connect_four"):
            raise ValueError(f"game = {game!r} must be 'tic_tac_toe' or 'connect_four'")
        self._picture: Callable[[Callable[[int], str]], str]
        if game == "tic_tac_toe":
            self._lines, self._told = tic_tac_toe.GAME, tic_tac_toe.RULES
            self._picture = tic_tac_toe.picture
        else:
            self._lines, self._told = connect_four.GAME, connect_four.RULES
            self._picture = connect_four.picture
        if not 0 <= opening <= MOST_OPENING:
            raise ValueError(f"opening = {opening} must be from 0 to {MOST_OPENING}")
        if max_invalid < 1:
            raise ValueError(f"max_invalid = {max_invalid} must be at least 1")
        self.rules = rules
        self.opening = opening
        self.max_invalid = max_invalid
        self._pieces = [0, 0]
        """Fields of each player, as in `Lines`."""
        self._player = 0
        self._invalid = [0, 0]
        self._begun: set[int] = set()
        self._winner: int | None = None
        self._lost = False
        """True if a game has ended by turns without an allowed move."""
        self._over = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        dice = random.Random(seed)
        self._pieces = self._opened(dice.randint(0, self.opening), dice)
        return self._shown(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        player, other = self._player, 1 - self._player
        numbers = re.findall(r"[0-9]{1,4}", action)
        full = self._pieces[0] | self._pieces[1]
        place = self._lines.landing(full, int(numbers[-1]) - 1) if numbers else None
        if place is None:
            self._invalid[player] += 1
            self._lost = self._over = self._invalid[player] >= self.max_invalid
        else:
            self._pieces[player] |= 1 << place
            if self._lines.wins(self._pieces[player], place):
                self._winner, self._over = player, True
            self._over = self._over or self._lines.full(self._pieces[0] | self._pieces[1])
            self._player = other
        reward = 1.0 if self._winner is not None else -1.0 if self._lost else 0.0
        info = self._info()
        if self._winner is not None:
            info["rewards"] = {other: -1.0}
        return self._shown(), reward, self._over, False, info

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _opened(self, moves: int, dice: random.Random) -> list[int]:
        """Return the fields of both players after so many random moves, of which none wins; the
        player who has the next turn first."""
        own = other = 0
        for _ in range(moves):
            places = [place for _, place in self._lines.moves(own | other)]
            dice.shuffle(places)
            free = (each for each in places if not self._lines.wins(own | 1 << each, each))
            own, other = other, own | 1 << next(free)
        return [own, other]

    def _shown(self) -> str:
        """Return the board as the player sees it who has the next turn."""
        first = self._player not in self._begun
        self._begun.add(self._player)
        return (self._told if first and self.rules else "") + self._picture(self._sign)

    def _sign(self, place: int) -> str:
        own, other = self._pieces[self._player], self._pieces[1 - self._player]
        return POLICY if own >> place & 1 else OPPONENT if other >> place & 1 else ""

    def _info(self) -> dict[str, Any]:
        fields = range(self._lines.rows * self._lines.columns)
        return {
            "seat": self._player,
            "success": self._winner is not None,
            "drawn": self._over and self._winner is None and not self._lost,
            "first_won": self._winner == 0,
            "invalid": sum(self._invalid),
            "state": "".join(self._sign(place) or "_" for place in fields),
        }
