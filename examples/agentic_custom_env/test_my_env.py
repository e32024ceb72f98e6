"""Test of the environment, without a model: it keeps the rules of environments, and a policy that
knows the way succeeds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from my_env import PhoneBook  # type: ignore[import-not-found]  # a file beside this one

from roll.envs.contract import check_env


def caller(said: str) -> str:
    """Ask the tool; then repeat what it says."""
    if not said.startswith("phone of "):
        return said
    call = {"name": "phone", "arguments": {"name": said.removeprefix("phone of ")}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def test_the_phone_book_keeps_the_rules_of_environments() -> None:
    check_env(PhoneBook, solver=lambda: caller, reward_range=(0, 1))


def test_mistakes_are_told_and_cost_nothing() -> None:
    book = PhoneBook()
    book.reset(seed=1)
    for wrong in ("oh", '{"name": "x", "arguments": {}}'):
        results, reward, over, _, _ = book.step(f"<tool_call>{wrong}</tool_call>")
        assert results[0]["content"].startswith("Error: ")
        assert (reward, over) == (0.0, False)
