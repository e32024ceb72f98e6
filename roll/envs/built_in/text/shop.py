"""`shop`: find a good that suits a wish, choose its options, and buy it, as in WebShop."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

from roll.envs.built_in.commands import last_command
from roll.envs.built_in.text.bm25 import Bm25
from roll.envs.built_in.text.goods import Good, make_goods, make_wish, suits

MAX_PAGES = 5
BUY, BACK, NEXT, PREVIOUS, DETAILS = "buy now", "back to search", "next", "previous", "description"


class Shop:
    """Shop with pages. A turn ends with a line `search: WORDS` or `click: THING`, where the thing
    is one of those in brackets on the page.

    The reward for buying is from 0 to 1: how well the good and its options suit the wish, by the
    formula of WebShop. `success` means 1. Wishes follow from the seed, and one good at least
    fulfils each of them.

    Args:
        goods: number of goods.
        per_page: number of goods on a page of results.
        goods_seed: seed of the goods; all tasks share them.
        rules: explain the commands in the first observation.
    """

    def __init__(
        self, goods: int = 300, per_page: int = 5, goods_seed: int = 0, rules: bool = True
    ) -> None:
        """Take the arguments, which the class describes; ValueError for one that is out of its
        range."""
        if not 1 <= goods <= 10_000 or per_page < 1:
            raise ValueError(
                f"goods = {goods} must be from 1 to 10000, per_page = {per_page} at least 1"
            )
        self.goods = goods
        self.per_page = per_page
        self.goods_seed = goods_seed
        self.rules = rules
        self._invalid = 0
        self._reward = 0.0
        self._over = False
        self._found: list[Good] = []
        self._page = 0
        self._good: Good | None = None
        self._chosen: dict[str, str] = {}
        self._details = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._goods, self._index = _indexed(self.goods_seed, self.goods)
        self._wish = make_wish(random.Random(seed), self._goods)
        rules = (
            "You are in a shop. End each turn with `search: words` or `click: thing`; you can "
            "click what stands in [brackets]. Choose the options before you buy.\n"
        )
        return (rules if self.rules else "") + f"{self._wish.told()}\n{self._shown()}", self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        command = last_command(action, ("search", "click"))
        if self._over:
            pass
        elif command is None or not self._done(*command):
            self._invalid += 1
        return self._shown(), self._reward, self._over, False, self._info()

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _done(self, name: str, argument: str) -> bool:
        """Carry out a command; return whether it was possible."""
        thing = " ".join(argument.casefold().strip("[]").split())
        if name == "search":
            most = MAX_PAGES * self.per_page
            self._found = [self._goods[i] for i in self._index.search(argument, most)]
            self._page, self._good = 0, None
            return True
        if self._good is None:
            return self._clicked_result(thing)
        return self._clicked_good(thing, self._good)

    def _clicked_result(self, thing: str) -> bool:
        """Click on a page of results; return whether that is possible."""
        on_page = {good.code: good for good in self._on_page()}
        if thing in on_page:
            self._good, self._chosen, self._details = on_page[thing], {}, False
        elif thing == NEXT and (self._page + 1) * self.per_page < len(self._found):
            self._page += 1
        elif thing == PREVIOUS and self._page:
            self._page -= 1
        else:
            return False
        return True

    def _clicked_good(self, thing: str, good: Good) -> bool:
        """Click on the page of a good; return whether that is possible."""
        names = [name for name, values in good.options.items() if thing in values]
        if thing == BUY:
            self._reward, self._over = suits(self._wish, good, self._chosen), True
        elif thing == BACK:
            self._good = None
        elif thing == DETAILS:
            self._details = True
        elif names:
            self._chosen[names[0]] = thing
        else:
            return False
        return True

    def _on_page(self) -> list[Good]:
        """Return the goods on the present page of results."""
        first = self._page * self.per_page
        return self._found[first : first + self.per_page]

    def _info(self) -> dict[str, Any]:
        """Return the `info` of `reset` and `step`; `state` is the codes of the goods on the page,
        and the options chosen."""
        place = self._good.code if self._good else " ".join(one.code for one in self._on_page())
        chosen = ", ".join(f"{name} {value}" for name, value in sorted(self._chosen.items()))
        return {
            "success": self._over and self._reward == 1.0,
            "invalid": self._invalid,
            "state": f"{place} {chosen if self._good else ''}".strip(),
        }

    def _shown(self) -> str:
        """Return the page that the policy sees: the result, a good, or a page of results."""
        if self._over:
            return f"Bought. It suits the wish to {self._reward:.2f}."
        if self._good is not None:
            return self._shown_good(self._good)
        if not self._found:
            return "No results. Search for something."
        pages = -(-len(self._found) // self.per_page)
        lines = [f"Results, page {self._page + 1} of {pages}:"]
        lines += [f"[{one.code}] {one.title}, {one.price:.2f} dollars" for one in self._on_page()]
        turns = [f"[{NEXT}]"] * (self._page + 1 < pages) + [f"[{PREVIOUS}]"] * bool(self._page)
        return "\n".join([*lines, *([" ".join(turns)] if turns else [])])

    def _shown_good(self, good: Good) -> str:
        """Return the page of one good, with its options and what can be clicked."""
        lines = [f"{good.title}, {good.price:.2f} dollars"]
        if self._details:
            lines.append(f"Description: {', '.join(sorted(good.features))}.")
        for name, values in good.options.items():
            chosen = self._chosen.get(name, "none")
            lines.append(f"{name}: {' '.join(f'[{each}]' for each in values)} (chosen: {chosen})")
        lines.append(f"[{DETAILS}] [{BACK}] [{BUY}]")
        return "\n".join(lines)


@cache
def _indexed(seed: int, count: int) -> tuple[list[Good], Bm25]:
    """Return the goods and their index; one for all episodes of a process."""
    goods = make_goods(seed, count)
    texts = [f"{one.title} {one.department} {' '.join(sorted(one.features))}" for one in goods]
    return goods, Bm25(texts)
