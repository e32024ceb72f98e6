"""`blackjack`: come nearer to 21 than the dealer, by the rules of gymnasium's Blackjack."""

from __future__ import annotations

import random
import re
from typing import Any

CARDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10)
"""Values of the cards; an ace is 1. Each is drawn with the same chance, from an endless deck."""
DEALER_STICKS = 17
MAX_INVALID = 3
"""Number of turns without a move that lose the game, so that it never pays to refuse to play."""


class Blackjack:
    """Blackjack against a dealer who draws up to 17. A turn is `hit` or `stick`; the last one
    counts.

    The reward is 1 for a game that is won, 0 for a draw, -1 for a loss. Three turns without a move
    lose the game.

    Args:
        natural: pay 1.5 for a game won with an ace and a ten.
        sutton_barto: the rules in the book of Sutton and Barto: an ace and a ten win, unless the
            dealer has them, too; overrides `natural`.
        rules: explain the game in the first observation.
    """

    def __init__(
        self, natural: bool = False, sutton_barto: bool = False, rules: bool = True
    ) -> None:
        """Take the arguments, which the class describes."""
        self.natural = natural
        self.sutton_barto = sutton_barto
        self.rules = rules
        self._invalid = 0
        self._reward = 0.0
        self._over = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._dice = random.Random(seed)
        self._player = [self._card(), self._card()]
        self._dealer = [self._card(), self._card()]
        rules = (
            "Come as near to 21 as you can, and not above. Cards count 1 to 10, an ace 11 if that "
            "fits. The dealer draws until 17. Answer with `hit` (take a card) or `stick`.\n"
        )
        return (rules if self.rules else "") + self._shown(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        moves = re.findall(r"\b(hit|stick|stand)\b", action, re.IGNORECASE)
        if self._over:
            pass
        elif not moves:
            self._invalid += 1
            if self._invalid >= MAX_INVALID:
                self._end(-1.0)
        elif moves[-1].lower() == "hit":
            self._player.append(self._card())
            if total(self._player) > 21:
                self._end(-1.0)
        else:
            while total(self._dealer) < DEALER_STICKS:
                self._dealer.append(self._card())
            self._end(self._compared())
        return self._shown(), self._reward, self._over, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _end(self, reward: float) -> None:
        self._reward, self._over = reward, True

    def _compared(self) -> float:
        """Return the reward of a player who sticks."""
        mine, yours = total(self._player), total(self._dealer)
        won = yours > 21 or mine > yours
        natural = sorted(self._player) == [1, 10]
        if self.sutton_barto and natural and sorted(self._dealer) != [1, 10]:
            return 1.0
        if won and natural and self.natural and not self.sutton_barto:
            return 1.5
        return 1.0 if won else 0.0 if mine == yours else -1.0

    def _card(self) -> int:
        return self._dice.choice(CARDS)

    def _shown(self) -> str:
        """Return the cards as text; before the end, only the first one of the dealer."""
        hidden = self._dealer if self._over else self._dealer[:1]
        return (
            f"Your cards: {_names(self._player)} (total {total(self._player)})\n"
            f"Dealer: {_names(hidden)}" + (f" (total {total(hidden)})" if self._over else "")
        )

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the player's total, the dealer's open
        card and 1 if an ace counts 11."""
        usable = 1 in self._player and sum(self._player) + 10 <= 21
        return {
            "success": self._over and self._reward > 0,
            "drawn": self._over and self._reward == 0,
            "lost": self._over and self._reward < 0,
            "invalid": self._invalid,
            "state": f"{total(self._player)} {self._dealer[0]} {int(usable)}",
        }


def total(cards: list[int]) -> int:
    """Return the value of a hand, in which one ace counts 11 if that is not above 21."""
    plain = sum(cards)
    return plain + 10 if 1 in cards and plain + 10 <= 21 else plain


def _names(cards: list[int]) -> str:
    return ", ".join("ace" if card == 1 else str(card) for card in cards)
