"""Goods of the shop, made by a script, and how well one of them suits a wish."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Department:
    """Kind of goods in the shop; texts are lists, separated by commas."""

    kinds: str
    features: str
    options: dict[str, str]


_DEPARTMENTS = {
    "clothing": _Department(
        "t-shirt, jacket, sweater, trousers, dress, raincoat",
        "machine washable, waterproof, organic cotton, slim fit, long sleeve, wool blend, "
        "with pockets, stretchable",
        {
            "size": "small, medium, large, extra large",
            "color": "black, blue, red, green, white",
        },
    ),
    "shoes": _Department(
        "sneakers, boots, sandals, slippers, loafers",
        "rubber sole, non slip, memory foam, leather, lightweight, arch support, breathable, vegan",
        {"size": "36, 38, 40, 42, 44", "color": "black, brown, grey, white"},
    ),
    "food": _Department(
        "granola, green tea, coffee, crackers, olive oil, jam",
        "gluten free, low sugar, fair trade, non gmo, keto friendly, kosher, plant based, "
        "caffeine free",
        {"flavor": "original, lemon, ginger, vanilla", "pack": "single, pack of 3, pack of 6"},
    ),
    "home": _Department(
        "desk lamp, cushion, bath mat, bookshelf, curtain, wall clock",
        "easy to clean, space saving, solid wood, energy saving, handmade, easy to assemble, "
        "scratch resistant, silent",
        {"color": "beige, grey, navy, white", "size": "small, medium, large"},
    ),
}
_MAKERS = ("Alden", "Brightly", "Corva", "Dunmore", "Eastby", "Fernwick", "Gale", "Hollis", "Ivora")


@dataclass(frozen=True, slots=True)
class Good:
    """Thing that is for sale."""

    code: str
    department: str
    kind: str
    title: str
    features: frozenset[str]
    options: dict[str, tuple[str, ...]]
    """Values to choose from, by name."""
    price: float


@dataclass(frozen=True, slots=True)
class Wish:
    """Description of the good to buy."""

    target: Good
    """A good that fulfils the wish."""
    features: frozenset[str]
    options: dict[str, str]
    most: float
    """Largest price."""

    def told(self) -> str:
        """Return the wish as a sentence."""
        features = ", ".join(sorted(self.features))
        chosen = "".join(f", {name} {value}" for name, value in self.options.items())
        return f"Buy {self.target.kind}: {features}{chosen}; price at most {self.most:.2f} dollars."


def make_goods(seed: int, count: int) -> list[Good]:
    """Return goods that follow from the seed."""
    dice, goods = random.Random(seed), []
    for number in range(count):
        name = dice.choice(sorted(_DEPARTMENTS))
        department = _DEPARTMENTS[name]
        kind = dice.choice(department.kinds.split(", "))
        features = dice.sample(department.features.split(", "), dice.randint(2, 4))
        options = {each: _some(dice, values) for each, values in department.options.items()}
        title = f"{dice.choice(_MAKERS)} {kind}, {', '.join(features[:2])}"
        price = dice.randrange(500, 12_000) / 100
        good = Good(f"b{number:04d}", name, kind, title, frozenset(features), options, price)
        goods.append(good)
    return goods


def _some(dice: random.Random, values: str) -> tuple[str, ...]:
    """Return at least two of the values, in their order."""
    known = values.split(", ")
    return tuple(sorted(dice.sample(known, dice.randint(2, len(known))), key=known.index))


def make_wish(dice: random.Random, goods: list[Good]) -> Wish:
    """Return a wish that at least one of the goods fulfils."""
    target = dice.choice(goods)
    features = dice.sample(sorted(target.features), dice.randint(1, 2))
    options = {name: dice.choice(values) for name, values in target.options.items()}
    most = float(10 * (int(target.price // 10) + dice.randint(1, 3)))
    return Wish(target, frozenset(features), options, most)


def suits(wish: Wish, good: Good, chosen: dict[str, str]) -> float:
    """Return how well a bought good suits a wish, from 0 to 1.

    The formula is that of WebShop (Yao et al., 2022): the share of the wished features, options and
    the price that are met, times the match of the type: here 1 for the same kind, 0.5 for the same
    department, and 0 otherwise.
    """
    if good.department != wish.target.department:
        return 0.0
    met = len(wish.features & good.features) + (good.price <= wish.most)
    met += sum(chosen.get(name) == value for name, value in wish.options.items())
    kind = 1.0 if good.kind == wish.target.kind else 0.5
    return kind * met / (len(wish.features) + len(wish.options) + 1)
