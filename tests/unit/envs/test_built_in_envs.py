"""Rules of all built-in environments, also of those that have no test of their own yet."""

from __future__ import annotations

import asyncio
from inspect import isawaitable
from typing import Any

import pytest

from roll.envs.contract import check_env
from roll.envs.loading import ENVS

MAKES_TASKS = [name for name in ENVS if ENVS[name].__module__.startswith("roll.envs.built_in.")]
"""Environments that make their own tasks; `tools` has none without a row."""


@pytest.mark.parametrize("name", MAKES_TASKS)
def test_a_built_in_environment_keeps_the_contract(name: str) -> None:
    trial = check_env(ENVS[name], seeds=range(2), max_turns=4)
    for episodes in trial.episodes.values():
        for one in episodes:
            for turn in one.turns:
                assert isinstance(turn.info["success"], bool)
                assert isinstance(turn.info["state"], str)
                assert turn.over or not turn.info["success"]
    (first, *_) = trial.episodes["empty"]
    counts = [turn.info["invalid"] for turn in first.turns]
    assert counts == list(range(1, len(counts) + 1)), "an empty turn is no action"


@pytest.mark.parametrize("name", MAKES_TASKS)
def test_rules_are_told_only_if_asked_for(name: str) -> None:
    async def opening(rules: bool) -> tuple[str, dict[str, Any]]:
        env = ENVS[name](rules=rules)
        begun = env.reset(seed=3, options={})
        said, info = await begun if isawaitable(begun) else begun
        ended = env.close()
        if isawaitable(ended):
            await ended
        assert isinstance(said, str)
        return said, info

    (told, info), (plain, same) = asyncio.run(opening(True)), asyncio.run(opening(False))
    assert told.endswith(plain)
    assert len(told) > len(plain) + 30
    assert len(told) < 1000, "short observations leave room for turns"
    assert info == same
    assert {"success", "invalid", "state"} <= info.keys()
