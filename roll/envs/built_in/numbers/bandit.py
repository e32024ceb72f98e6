"""`bandit`: slot machines with unknown chances; find the best one by playing."""

from __future__ import annotations

import random
import re
from typing import Any


class Bandit:
    """Machines that each pay 1 with a chance of its own. A turn is the number of a machine; the
    last number counts.

    The reward of a turn is what the machine pays. After `pulls` pulls the episode is over.

    Args:
        arms: number of machines.
        pulls: number of pulls.
        gap: smallest difference between the chances of the best machine and the next.
        rules: explain the game in the first observation.
    """

    def __init__(
        self, arms: int = 4, pulls: int = 12, gap: float = 0.2, rules: bool = True
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if arms < 2 or pulls < 1 or not 0 <= gap <= 0.9:
            raise ValueError(
                f"arms = {arms} must be at least 2, pulls = {pulls} at least 1, gap = {gap:g} from "
                "0 to 0.9"
            )
        self.arms = arms
        self.pulls = pulls
        self.gap = gap
        self.rules = rules
        self._invalid = 0
        self._last = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._dice = random.Random(seed)
        best = self._dice.uniform(self.gap, 1.0)
        others = [self._dice.uniform(0.0, best - self.gap) for _ in range(self.arms - 1)]
        self._chances = [best, *others]
        self._dice.shuffle(self._chances)
        self._payments: list[list[int]] = [[] for _ in range(self.arms)]
        rules = (
            "Each slot machine pays 1 or nothing, with a chance of its own that does not change. "
            "Win as much as you can. Answer with the number of the machine to play.\n"
        )
        task = f"Machines: 1 to {self.arms}. You may play {self.pulls} times."
        return (rules if self.rules else "") + task, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        numbers = re.findall(r"[0-9]{1,6}", action)
        arm = int(numbers[-1]) - 1 if numbers else -1
        if not 0 <= arm < self.arms or not self._left:
            self._invalid += 1
            said = f"There are the machines 1 to {self.arms}."
            return said, 0.0, not self._left, False, self._info()
        paid = int(self._dice.random() < self._chances[arm])
        self._last = arm
        self._payments[arm].append(paid)
        said = f"Machine {arm + 1} pays {paid}. Plays left: {self._left}."
        return said, float(paid), not self._left, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    @property
    def _left(self) -> int:
        """Number of pulls that are left."""
        return self.pulls - sum(map(len, self._payments))

    def _info(self) -> dict[str, Any]:
        """Return `info`; `regret` is what the best machine would have paid more, on average."""
        best, over = max(self._chances), not self._left
        chosen = enumerate(self._payments)
        return {
            "success": over and self._chances[self._last] == best,
            "regret": sum((best - self._chances[arm]) * len(paid) for arm, paid in chosen),
            "invalid": self._invalid,
            "state": " ".join(f"{sum(paid)}/{len(paid)}" for paid in self._payments),
        }
