"""Turns of sources whose shares change: a planned order that is extended with the present shares.

What is planned stays: rows under way were drawn for planned turns, and a step takes its rows in the
order of the plan. So a new share takes effect after the turns planned before it, and nothing makes
up for the shares that were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WHOLE = 10**6
"""Sum of all shares. Whole numbers keep the plan free of rounding."""


class ChangingTurns:
    """Order in which sources have their turns."""

    def __init__(self, weights: Sequence[float]) -> None:
        """Begin without a plan; `weights` are those of the sources, in order, above zero."""
        self._weights = weights
        self._plan: deque[int] = deque()
        """Sources of the turns that did not end yet, the next one first."""
        self._due = [0] * len(weights)
        """Turns that each source is behind its share, times `WHOLE`; negative if it is ahead."""

    def source_of(self, turn: int, factors: Callable[[], Sequence[float]]) -> int:
        """Return the index of the source of a turn that did not end yet; turn 0 is the next one.

        Args:
            factors: function that returns the present factor of the weight of each source, above
                zero; used for turns that were not planned before.
        """
        if len(self._plan) <= turn:
            own = zip(self._weights, factors(), strict=True)
            shares = whole_shares([weight * factor for weight, factor in own])
            while len(self._plan) <= turn:
                self._due = [due + share for due, share in zip(self._due, shares, strict=True)]
                source = self._due.index(max(self._due))
                self._due[source] -= WHOLE
                self._plan.append(source)
        return self._plan[turn]

    def end(self, source: int) -> None:
        """End the next turn of the source with this index; ValueError if none of its turns is
        planned."""
        self._plan.remove(source)

    def state(self) -> dict[str, Any]:
        """Return the plan, as plain JSON."""
        return {"plan": list(self._plan), "due": list(self._due)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self._plan, self._due = deque(state["plan"]), list(state["due"])


def whole_shares(weights: Sequence[float]) -> list[int]:
    """Return whole numbers with the sum `WHOLE`, as near to the proportion of the weights (above
    zero) as whole numbers can be (largest remainders; the first of equals)."""
    total = sum(weights)
    exact = [weight / total * WHOLE for weight in weights]
    shares = [int(each) for each in exact]
    by_rest = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in by_rest[: WHOLE - sum(shares)]:
        shares[i] += 1
    return shares
