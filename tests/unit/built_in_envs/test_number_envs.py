"""Environments about numbers, with their rules told once more."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from roll.envs.built_in.commands import last_command
from roll.envs.built_in.numbers.bandit import Bandit
from roll.envs.built_in.numbers.blackjack import Blackjack
from roll.envs.built_in.numbers.calculator import Calculator
from roll.envs.built_in.numbers.countdown import Countdown
from roll.envs.built_in.numbers.guess_number import GuessNumber
from roll.envs.contract import check_env


@pytest.mark.parametrize(
    ("action", "found"),
    [
        ("I think.\nanswer: 5", ("answer", "5")),
        ("answer: 5\ncalculate: 1 + 2 ", ("calculate", "1 + 2")),
        ("**Answer:** 5", ("answer", "5")),
        ("- `ANSWER: a: b`", ("answer", "a: b")),
        ("answer[5]", ("answer", "5")),
        ("answer: [5]", ("answer", "[5]")),
        ("The answer is: 5", None),
        ("reply: 5", None),
        ("answer:", ("answer", "")),
        ("", None),
    ],
)
def test_the_last_command_counts(action: str, found: tuple[str, str] | None) -> None:
    assert last_command(action, ("answer", "calculate")) == found


def halving() -> Callable[[str], str]:
    """A policy that halves the range that is left."""
    bounds: list[int] = []
    last = [0]

    def act(said: str) -> str:
        if said == "Larger.":
            bounds[0] = last[0] + 1
        elif said == "Smaller.":
            bounds[1] = last[0] - 1
        else:
            bounds[:] = [int(each) for each in re.findall(r"\d+", said)]
        last[0] = sum(bounds) // 2
        return f"I guess {last[0]}."

    return act


def test_a_number_is_found_by_halving() -> None:
    trial = check_env(
        GuessNumber, solver=halving, seeds=range(20), actions=["50", "7"], reward_range=(0, 1)
    )
    assert max(len(one.turns) for one in trial.episodes["solver"]) <= 7
    assert trial.tasks == 1, "the first observation does not tell the number"
    numbers = {one.actions[-1] for one in trial.episodes["solver"]}
    assert len(numbers) > 10


@pytest.mark.parametrize("action", ["none", "0", "101", "-5", "3.5", "9" * 30])
def test_what_is_no_guess_is_counted(action: str) -> None:
    env = GuessNumber()
    _, before = env.reset(seed=1)
    said, reward, over, _, info = env.step(action)
    assert (said, reward, over) == ("Guess a number from 1 to 100.", 0.0, False)
    assert (info["invalid"], info["state"]) == (1, before["state"])


def expressions(numbers: list[int]) -> dict[Fraction, str]:
    """Values that all of the numbers can make, each with an expression."""
    if len(numbers) == 1:
        return {Fraction(numbers[0]): str(numbers[0])}
    found: dict[Fraction, str] = {}
    indices = range(len(numbers))
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(indices, size):
            left = expressions([numbers[i] for i in chosen])
            right = expressions([numbers[i] for i in indices if i not in chosen])
            for (a, first), (b, second) in itertools.product(left.items(), right.items()):
                found.setdefault(a + b, f"({first} + {second})")
                found.setdefault(a - b, f"({first} - {second})")
                found.setdefault(a * b, f"({first} * {second})")
                if b:
                    found.setdefault(a / b, f"({first} / {second})")
    return found


def counting() -> Callable[[str], str]:
    def act(said: str) -> str:
        numbers = [int(each) for each in re.findall(r"\d+", said)]
        *given, wanted = numbers
        return f"Let me see.\n{expressions(given)[Fraction(wanted)]} = {wanted}"

    return act


@pytest.mark.parametrize("kwargs", [{"numbers": 3}, {"numbers": 4, "large": 0.0}])
def test_every_countdown_has_an_expression(kwargs: dict[str, Any]) -> None:
    kwargs = {"rules": False, **kwargs}
    check_env(Countdown, kwargs=kwargs, solver=counting, seeds=range(8), reward_range=(0, 1))


@pytest.mark.parametrize(
    ("action", "said", "reward"),
    [
        ("(3 + 5) * 2", "That is 16, right.", 1.0),
        ("answer: 2*(5+3) = 16", "That is 16, right.", 1.0),
        ("3 + 5 + 2", "That is 10, not 16.", 0.0),
        ("3 / 5 - 2", "That is -1.4, not 16.", 0.0),
        ("16", "16 is not given, or not so often.", 0.0),
        ("3 + 3 + 5 + 2", "3 is not given, or not so often.", 0.0),
        ("5 + 3", "2 must be used, too.", 0.0),
        ("2 ** 3 + 5", "I cannot read that: ^ is not allowed here.", 0.0),
        ("eval('16')", "I cannot read that: \"eval('16')\" is no arithmetic.", 0.0),
    ],
)
def test_a_countdown_of_a_row_is_judged(action: str, said: str, reward: float) -> None:
    env = Countdown()
    first, _ = env.reset(seed=1, options={"nums": [3, 5, 2], "target": 16, "id": "x"})
    assert first.endswith("Numbers: 3, 5, 2. Wanted: 16.")
    found, gained, over, _, info = env.step(action)
    assert (found, gained, over, info["success"]) == (said, reward, bool(reward), bool(reward))
    assert info["invalid"] == (not found.startswith("That is"))


def test_numbers_may_be_left_out_if_said_so() -> None:
    env = Countdown(use_all=False)
    env.reset(seed=1, options={"numbers": [3, 5, 2], "target": 8})
    assert env.step("3 + 5")[1] == 1.0


def asking() -> Callable[[str], str]:
    """A policy that gives the question to the calculator and repeats the answer."""

    def act(said: str) -> str:
        question = re.search(r"What is (.*)\?", said)
        return f"calculate: {question[1]}" if question else f"answer: {said}"

    return act


def test_a_calculator_answers_all_tasks() -> None:
    trial = check_env(
        Calculator,
        solver=asking,
        seeds=range(10),
        actions=["calculate: 1 + 1", "answer: 5"],
        reward_range=(0, 1),
    )
    for one in trial.episodes["solver"]:
        question = re.findall(r"What is (.*)\?", one.opening)[0]
        assert one.actions[-1] == f"answer: {eval(question)}"
        assert one.turns[-1].info["calculations"] == 1


@pytest.mark.parametrize(
    ("right", "answer", "reward"),
    [
        ("72", "72", 1.0),
        ("72", "72.0", 1.0),
        ("1,072", "$1072.", 1.0),
        ("0.5", "1/2", 1.0),
        (".5", ".5", 1.0),
        ("72", "71", 0.0),
        ("72", "", 0.0),
        ("72", "seventy-two", 0.0),
        ("north", "North.", 1.0),
        ("50%", "50%", 1.0),
        ("0", "0.001", 0.0),
        ("-72", "- 72", 1.0),
        ("-72", "\u221272", 1.0),
        ("1,234,567", "1,234,567", 1.0),
        ("72", "36 * 2", 0.0),
        ("72", "36 + 36", 0.0),
        ("72", "(72)", 0.0),
        ("2 * x", "2 * X", 1.0),
        ("36 * 2", "72", 1.0),
    ],
)
def test_answers_to_rows_are_compared(right: str, answer: str, reward: float) -> None:
    env = Calculator()
    first, _ = env.reset(options={"question": "How many?", "answer": right})
    assert first.endswith("How many?")
    _, found, over, _, info = env.step(f"So it is.\nanswer: {answer}")
    assert (found, over, info["success"]) == (reward, True, bool(reward))


def test_to_repeat_the_question_is_no_answer() -> None:
    for seed in range(10):
        env = Calculator()
        first, _ = env.reset(seed=seed)
        question = re.findall(r"What is (.*)\?", first)[0]
        _, reward, over, _, info = env.step(f"answer: {question}")
        assert (reward, over, info["success"]) == (0.0, True, False), question


def test_mistakes_at_the_calculator_can_be_read() -> None:
    env = Calculator()
    env.reset(seed=0)
    assert env.step("calculate: 6 / 0")[0] == "Error: division by zero."
    said, _, over, _, info = env.step("I do not know.")
    assert (said, over) == ("Write `calculate: ...` or `answer: ...`.", False)
    assert info["invalid"] == 2
    with pytest.raises(ValueError, match="question and no `answer`"):
        env.reset(options={"question": "?"})


def test_machines_pay_by_their_chances_and_the_best_is_told() -> None:
    paid, regrets = [], Counter[bool]()
    for seed in range(200):
        env = Bandit(arms=3, pulls=10, gap=0.3)
        env.reset(seed=seed)
        best = max(range(3), key=lambda arm: env._chances[arm])
        assert sorted(env._chances)[-1] - sorted(env._chances)[-2] >= 0.3 - 1e-9
        rewards = [env.step(f"machine {best + 1}") for _ in range(10)]
        paid.append((sum(each[1] for each in rewards), env._chances[best]))
        assert [each[2] for each in rewards] == [False] * 9 + [True]
        assert rewards[-1][4]["success"] is True
        regrets[rewards[-1][4]["regret"] == 0.0] += 1
        hits = int(paid[-1][0])
        assert rewards[-1][4]["state"].split()[best] == f"{hits}/10"
    wins, expected = sum(each for each, _ in paid), sum(10 * chance for _, chance in paid)
    assert abs(wins - expected) < 3 * (200 * 10 * 0.25) ** 0.5
    assert regrets == {True: 200}


def test_a_bandit_keeps_the_contract() -> None:
    check_env(Bandit, actions=["1", "2", "3", "4"], reward_range=(0, 12))
    env = Bandit(pulls=1)
    env.reset(seed=1)
    assert env.step("machine 9")[4]["invalid"] == 1
    assert env.step("1")[2]
    assert env.step("1")[2], "after the end nothing is paid"


def worth(cards: list[str]) -> int:
    hands = {sum(choice) for choice in itertools.product(*map(values, cards))}
    fit = [hand for hand in hands if hand <= 21]
    return max(fit) if fit else min(hands)


def values(card: str) -> tuple[int, ...]:
    return (1, 11) if card == "ace" else (int(card),)


def hand(said: str, who: str) -> list[str]:
    (cards,) = re.findall(rf"^{who}: ([^(\n]*)", said, re.MULTILINE)
    return [card.strip() for card in cards.split(",")]


@pytest.mark.parametrize("kwargs", [{}, {"natural": True}, {"sutton_barto": True}])
def test_blackjack_is_played_by_the_rules(kwargs: dict[str, Any]) -> None:
    ends = Counter[float]()
    for seed in range(400):
        env, dice = Blackjack(rules=False, **kwargs), random.Random(f"{seed}")
        said, _ = env.reset(seed=seed)
        assert len(hand(said, "Dealer")) == 1
        over, first = False, hand(said, "Your cards")
        while not over:
            before = hand(said, "Your cards")
            move = dice.choice(["hit", "stick"])
            said, reward, over, _, info = env.step(f"I {move}.")
            cards = hand(said, "Your cards")
            if move == "hit":
                assert len(cards) == len(before) + 1
                assert over == (worth(cards) > 21)
                assert reward == (-1.0 if over else 0.0)
                continue
            dealer = hand(said, "Dealer")
            assert worth(dealer) >= 17
            assert worth(dealer[:-1]) < 17 or len(dealer) == 2
            mine, yours = worth(cards), worth(dealer)
            wanted = 1.0 if yours > 21 or mine > yours else 0.0 if mine == yours else -1.0
            natural = cards == first and sorted(cards) == ["10", "ace"]
            if natural and "sutton_barto" in kwargs and sorted(dealer) != ["10", "ace"]:
                wanted = 1.0
            elif natural and wanted == 1.0 and "natural" in kwargs:
                wanted = 1.5
            assert (reward, over) == (wanted, True)
        ends[reward] += 1
        assert info["success"] == (reward > 0)
        assert info["drawn"] == (reward == 0)
    assert set(ends) == ({-1, 0, 1, 1.5} if "natural" in kwargs else {-1, 0, 1})


def test_a_ten_is_drawn_four_times_as_often_as_any_other_card() -> None:
    drawn = Counter[str]()
    for seed in range(2600):
        drawn.update(hand(Blackjack(rules=False).reset(seed=seed)[0], "Your cards"))
    assert set(drawn) == {"ace", *map(str, range(2, 11))}
    for card, times in drawn.items():
        assert abs(times - 400 * (4 if card == "10" else 1)) < 4 * 400**0.5 * 2


def test_blackjack_keeps_the_contract_and_refusing_to_play_loses() -> None:
    check_env(Blackjack, actions=["hit", "stick"], reward_range=(-1, 1))
    env = Blackjack()
    env.reset(seed=1)
    ends = [env.step("I rather hide") for _ in range(3)]
    assert [(each[1], each[2]) for each in ends] == [(0.0, False), (0.0, False), (-1.0, True)]


@pytest.mark.parametrize(
    ("env", "kwargs", "message"),
    [
        (GuessNumber, {"most": 0}, "most = 0"),
        (Countdown, {"numbers": 1}, "numbers = 1"),
        (Calculator, {"digits": 10}, "digits = 10"),
        (Bandit, {"gap": 1.0}, "gap = 1"),
    ],
)
def test_settings_that_make_no_task_are_refused(env: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        env(**kwargs)
