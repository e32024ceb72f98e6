"""Games in which the first to have a line of own pieces wins, and an opponent that looks ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

WIN = 1000
"""Value of a game that is won at once; a win after n more moves is worth n less."""
MOST_VALUES = 200_000
"""Number of positions whose value is kept."""


@dataclass(frozen=True)
class Lines:
    """Rules of a game. Fields are numbered row by row, from 0. A set of fields is an integer whose
    bit i stands for field i."""

    rows: int
    columns: int
    length: int
    """Number of pieces in a line that wins."""
    drops: bool
    """True if pieces fall to the lowest free field of their column; a move is then a column,
    otherwise a field."""
    _values: dict[tuple[int, int], int] = field(default_factory=dict, compare=False, repr=False)
    """Values of positions that were looked at to the end of the game."""

    @cached_property
    def _through(self) -> list[list[int]]:
        """The lines through each field."""
        found: list[list[int]] = [[] for _ in range(self.rows * self.columns)]
        for row in range(self.rows):
            for column in range(self.columns):
                for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                    ends = row + down * (self.length - 1), column + right * (self.length - 1)
                    if not (0 <= ends[0] < self.rows and 0 <= ends[1] < self.columns):
                        continue
                    fields = [
                        (row + i * down) * self.columns + column + i * right
                        for i in range(self.length)
                    ]
                    line = sum(1 << each for each in fields)
                    for each in fields:
                        found[each].append(line)
        return found

    @cached_property
    def _order(self) -> list[int]:
        """All moves, those near the middle first, which makes the search shorter."""
        moves = range(self.columns if self.drops else self.rows * self.columns)

        def distance(move: int) -> int:
            row, column = (0, move) if self.drops else divmod(move, self.columns)
            aside = abs(2 * column - self.columns + 1)
            return aside if self.drops else aside + abs(2 * row - self.rows + 1)

        return sorted(moves, key=distance)

    def landing(self, taken: int, move: int) -> int | None:
        """Return the field that a move takes; None if the move is not allowed."""
        if not self.drops:
            inside = 0 <= move < self.rows * self.columns
            return move if inside and not taken >> move & 1 else None
        if not 0 <= move < self.columns:
            return None
        for row in reversed(range(self.rows)):
            place = row * self.columns + move
            if not taken >> place & 1:
                return place
        return None

    def moves(self, taken: int) -> Iterator[tuple[int, int]]:
        """Yield the allowed moves with the fields that they take."""
        for move in self._order:
            place = self.landing(taken, move)
            if place is not None:
                yield move, place

    def wins(self, own: int, place: int) -> bool:
        """Return whether a piece on `place` completes a line of the fields `own`, which contain
        it."""
        return any(own & line == line for line in self._through[place])

    def full(self, taken: int) -> bool:
        """Return whether the set `taken` has all fields."""
        return taken == (1 << self.rows * self.columns) - 1

    def value(self, own: int, other: int, depth: int, low: int, high: int) -> int:
        """Return the value of a position for the player to move (`own`), by negamax.

        Args:
            own: fields of the player to move.
            other: fields of the other one.
            depth: number of moves to look ahead; positions beyond count as drawn.
            low: bound of alpha-beta search: the result is exact if it lies between the bounds, and
                otherwise lies on the same side of them as the value.
            high: see `low`.
        """
        taken = own | other
        if self.full(taken) or depth == 0:
            return 0
        whole = depth >= self.rows * self.columns - taken.bit_count()
        if whole and (own, other) in self._values:
            return self._values[own, other]
        best, alpha = -WIN, low
        for _, place in self.moves(taken):
            mine = own | 1 << place
            if self.wins(mine, place):
                best = WIN
                break
            found = -self.value(other, mine, depth - 1, -high - 1, -alpha + 1)
            best = max(best, found - (found > 0) + (found < 0))
            alpha = max(alpha, best)
            if alpha >= high:
                break
        exact = low < best < high or best == WIN
        if whole and exact and len(self._values) < MOST_VALUES:
            self._values[own, other] = best
        return best

    def best_moves(self, own: int, other: int, depth: int) -> list[int]:
        """Return all moves of the highest value for the player `own`, who must have an allowed
        one."""
        values = {}
        for move, place in self.moves(own | other):
            mine = own | 1 << place
            if self.wins(mine, place):
                values[move] = WIN
            else:
                values[move] = -self.value(other, mine, depth - 1, -WIN - 1, WIN + 1)
        best = max(values.values())
        return sorted(move for move, value in values.items() if value == best)

    def reply(
        self, own: int, other: int, *, strength: float, depth: int, dice: random.Random
    ) -> int:
        """Return a move of a scripted player: with probability `strength` one of the best, else any
        move that is allowed."""
        if dice.random() < strength:
            return dice.choice(self.best_moves(own, other, depth))
        return dice.choice(sorted(move for move, _ in self.moves(own | other)))
