"""Every built-in reward keeps the contract that users can check for their own."""

import asyncio
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest

from roll.core.types import Sample
from roll.rewards.api import RewardContext
from roll.rewards.built_in import REWARDS
from roll.rewards.contract import check_reward, sample_of
from roll.rewards.loading import load_reward

ADD = {"tests": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}}
NEEDS: dict[str, dict[str, Any]] = {
    "code": {"extra": ADD},
    "detection": {"answer": '[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]'},
    "format": {"kwargs": {"tags": ("think", "answer"), "language": "en", "words": (1, 9)}},
    "json": {"kwargs": {"schema": {"type": "object"}}},
    "hygiene": {"kwargs": {"rules": ("language_mixing", "text_after_end", "tool_syntax")}},
    "length": {"kwargs": {"longest": 9}},
    "multiple_choice": {"answer": "C"},
    "pattern": {"kwargs": {"pattern": r"(\w+)\1"}},
    "ifeval": {"extra": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}},
}
"""Arguments of `check_reward` for rewards that need columns or options, by name."""


@pytest.mark.parametrize("name", list(REWARDS))
def test_built_in_rewards_keep_the_contract(name: str) -> None:
    check_reward(REWARDS[name], **NEEDS.get(name, {}))


ROW = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], **ADD}
BOX = '[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]'
RIGHT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bleu": ("the cat sat down", "the cat sat down", {}),
    "code": ("def add(a, b): return a + b", "", {}),
    "contains": ("the cat", "cat", {}),
    "crossthink": (r"\boxed{C}", "C", {"thoughts": False}),
    "detection": (BOX, BOX, {}),
    "ifeval": ("no comma", "", {}),
    "json": ("{}", "", {"schema": {"type": "object"}}),
    "math": (r"\boxed{7}", "7", {}),
    "multiple_choice": ("The answer is C.", "C", {}),
    "number": ("7", "7", {}),
    "pattern": ("cat", "", {"pattern": "cat"}),
    "qa": ("Answer: cat", "cat", {}),
    "rouge": ("the cat", "the cat", {}),
    "similarity": ("the cat", "the cat", {}),
}
"""Responses that are right, with the answers of their rows and arguments, by the reward."""
OF_FORM = {"exact", "format", "hygiene", "length", "repetition"}
"""Rewards that look at the whole response."""


@pytest.mark.parametrize("name", sorted(set(REWARDS) - OF_FORM))
def test_answers_count_after_the_thoughts_only(name: str) -> None:
    response, answer, kwargs = RIGHT[name]

    def score(text: str) -> float:
        reward = load_reward(name, kwargs, RewardContext("mine", 0))
        value = reward.call(one := sample_of(text, answer=answer, extra=ROW))
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return float(reward.result(one, value).score)

    assert score(response) == score(f"<think>hm</think>\n{response}") == pytest.approx(1)
    assert score(f"<think>{response}") == score(f"<think>{response}</think>") == score("") == 0


def test_an_async_reward_with_arguments_can_be_checked() -> None:
    async def brief(sample: Sample, *, limit: int) -> float:
        return float(len(sample.response_text) <= limit)

    check_reward(brief, kwargs={"limit": 100})


def _divides(sample: Sample) -> float:
    return 1 / len(sample.response_text)


def _random(sample: Sample) -> float:
    return random.random()


def _nothing(sample: Sample) -> None:
    return None


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (_divides, "an empty response, answer '42': ZeroDivisionError"),
        (_random, "first Reward"),
        (_nothing, "score is None; is a `return` missing"),
    ],
)
def test_a_reward_that_breaks_the_contract_is_told_how(fn: Callable[..., Any], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_reward(fn)
