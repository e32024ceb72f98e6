"""The shop: a policy that reads its pages can fulfil every wish; the reward is that of WebShop."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from roll.envs.built_in.text.goods import Good, Wish, suits
from roll.envs.built_in.text.shop import Shop
from roll.envs.contract import check_env


def buyer() -> Callable[[str], str]:
    """A policy that reads descriptions until a good has all that is wished."""
    wish: dict[str, Any] = {}
    seen: list[str] = []
    left: list[str] = []

    def chosen() -> str:
        return f"click: {left.pop(0)}"

    def act(said: str) -> str:
        asked = re.search(r"Buy ([^:]+): (.*); price at most ([\d.]+) dollars", said)
        if asked:
            wish.update(kind=asked[1], wanted=asked[2].split(", "), most=float(asked[3]))
            return f"search: {asked[1]} {asked[2]}"
        if left:
            return chosen()
        if said.startswith("Results"):
            for code, title, price in re.findall(r"\[(b\d+)\] (.*), ([\d.]+) dollars", said):
                right = f" {wish['kind']}," in title and float(price) <= wish["most"]
                if right and code not in seen:
                    seen.append(code)
                    return f"click: {code}"
            return "click: next"
        if "Description:" not in said:
            return "click: description"
        has = re.findall(r"Description: (.*)\.", said)[0].split(", ")
        options = dict(re.findall(r"^(\w+): (\[.*\]) \(chosen", said, re.MULTILINE))
        for wanted in wish["wanted"]:
            name, _, value = wanted.partition(" ")
            if name in options:
                if f"[{value}]" not in options[name]:
                    return "click: back to search"
                left.append(value)
            elif wanted not in has:
                left.clear()
                return "click: back to search"
        left.append("buy now")
        return chosen()

    return act


def test_every_wish_can_be_fulfilled() -> None:
    check_env(
        Shop,
        solver=buyer,
        seeds=range(12),
        max_turns=80,
        actions=["search: boots", "click: b0001", "click: buy now", "click: next"],
        reward_range=(0, 1),
    )


def good(**changes: Any) -> Good:
    made: dict[str, Any] = {
        "code": "b1",
        "department": "shoes",
        "kind": "boots",
        "title": "Gale boots",
        "features": frozenset({"vegan", "leather"}),
        "options": {"size": ("36", "38")},
        "price": 50.0,
    }
    return Good(**(made | changes))


@pytest.mark.parametrize(
    ("bought", "chosen", "reward"),
    [
        (good(), {"size": "36"}, 1.0),
        (good(), {"size": "38"}, 3 / 4),
        (good(), {}, 3 / 4),
        (good(price=60.01), {"size": "36"}, 3 / 4),
        (good(features=frozenset({"vegan", "non slip"})), {"size": "36"}, 3 / 4),
        (good(kind="sandals"), {"size": "36"}, 1 / 2),
        (good(kind="sandals", features=frozenset(), price=99.0), {}, 0.0),
        (good(department="food"), {"size": "36"}, 0.0),
    ],
)
def test_the_reward_is_the_share_of_what_was_wished(
    bought: Good, chosen: dict[str, str], reward: float
) -> None:
    wish = Wish(good(), frozenset({"vegan", "leather"}), {"size": "36"}, 60.0)
    assert suits(wish, bought, chosen) == pytest.approx(reward)


def test_pages_are_turned_and_what_is_not_there_cannot_be_clicked() -> None:
    env = Shop(per_page=2)
    env.reset(seed=4)
    first, *_ = env.step("search: boots")
    assert first.startswith("Results, page 1 of 5:")
    assert first.count("[b") == 2
    second, *_ = env.step("click: [Next]")
    assert second.startswith("Results, page 2 of 5:")
    assert not set(re.findall(r"b\d{4}", first)) & set(re.findall(r"b\d{4}", second))
    for action in ("click: b9999", "click: buy now", "click: 36", "buy it"):
        said, reward, over, _, info = env.step(action)
        assert (said, reward, over) == (second, 0.0, False)
    assert info["invalid"] == 4
    assert env.step("click: previous")[0] == first
    code = re.findall(r"b\d{4}", first)[0]
    assert env.step(f"click: {code}")[4]["state"] == code
    said, reward, over, _, info = env.step("click: Buy Now")
    assert over
    assert said == f"Bought. It suits the wish to {reward:.2f}."
    assert info["success"] == (reward == 1.0)
    assert env.step("search: other")[2], "the episode stays over"


def test_a_search_for_nothing_shows_nothing() -> None:
    env = Shop(rules=False)
    first, _ = env.reset(seed=1)
    assert first.startswith("Buy ")
    assert env.step("search: qqq")[0] == "No results. Search for something."
    with pytest.raises(ValueError, match="goods = 0"):
        Shop(goods=0)
