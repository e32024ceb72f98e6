"""The environment that users copy keeps the rules, and its tool is of use to a policy."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.agentic_custom_env.my_env import FakeCoin
from examples.tiny_model import given
from roll.cli import app
from roll.config.loading.overrides import parse_override
from roll.envs.contract import check_env

FOLDER = Path(__file__).parents[3] / "examples" / "agentic_custom_env"


@pytest.mark.slow
def test_a_script_does_not_replace_a_model_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "policy.safetensors").write_text("trained for a week")
    script = FOLDER.parent / "random_model.py"
    told = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "is made already" in told
    assert [path.name for path in tmp_path.iterdir()] == ["policy.safetensors"]


@pytest.mark.parametrize("name", ["a #1", "a: b", "{x", 'say "é😀"', "back\\slash", "1e3"])
def test_a_script_gives_a_run_the_folder_that_it_was_told(name: str) -> None:
    assert parse_override(given("output_dir", Path(name))).value == name


def call(arguments: Any, name: str = "weigh") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def weigher() -> Callable[[str], str]:
    """A policy that weighs a third of the suspects against another third."""
    suspects, third = list(range(1, 10)), 0

    def act(said: str) -> str:
        nonlocal suspects, third
        parts = {
            "left": suspects[:third],
            "right": suspects[third : 2 * third],
            "both": suspects[2 * third :],
        }
        suspects = parts.get(said.split()[0], suspects)
        third = len(suspects) // 3
        if not third:
            return f"It is coin {suspects[0]}."
        return call({"left": suspects[:third], "right": suspects[third : 2 * third]})

    return act


def test_it_keeps_the_rules_and_two_weighings_find_the_coin() -> None:
    trial = check_env(FakeCoin, solver=weigher, reward_range=(0, 1), seeds=range(20))
    assert {len(one.turns) for one in trial.episodes["solver"]} == {3}
    assert {one.turns[-1].info["calls"] for one in trial.episodes["solver"]} == {2}


def test_the_balance_shows_the_lighter_side() -> None:
    dice = random.Random(0)
    for seed in range(50):
        game = FakeCoin()
        game.reset(seed=seed)
        weights = {coin: 9 if coin == game.fake else 10 for coin in range(1, 10)}
        coins = dice.sample(range(1, 10), 6)
        left, right = coins[: dice.randint(0, 6)], coins[6 - dice.randint(0, 3) :]
        right = [coin for coin in right if coin not in left]
        heavier = sum(weights[coin] for coin in left) - sum(weights[coin] for coin in right)
        expected = "right is lighter" if heavier > 0 else "left is lighter"
        assert game.weigh(left, right) == (expected if heavier else "both weigh the same")


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("<tool_call>oh</tool_call>", "not valid JSON"),
        (call({}, name="wiegh"), "there is no tool 'wiegh'"),
        (call({"left": [1]}), "right: Field required"),
        (call({"left": [1], "right": ["two"]}), "wrong arguments"),
        (call({"left": [1], "right": [1]}), "lies in one pan at most"),
        (call({"left": [0], "right": [1]}), "lies in one pan at most"),
    ],
)
def test_a_mistake_is_told_and_counted(action: str, told: str) -> None:
    game = FakeCoin()
    game.reset(seed=1)
    results, reward, over, cut, info = asyncio.run(game.step(action))
    assert isinstance(results, list)
    (result,) = results
    assert isinstance(result, dict)
    assert (result["role"], told in result["content"]) == ("tool", True), result
    assert (reward, over, cut, info["mistakes"]) == (0.0, False, False, 1)


def test_the_commands_of_its_page_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    weighing = call({"left": [1, 2], "right": [3, 4]})
    tried = ["env", "try", "my_env:FakeCoin", "--action", "5", "--action", weighing]
    found = CliRunner().invoke(app, tried)
    assert found.exit_code == 0, found.output
    assert "ok: the same seed gives the same answers" in found.output


def test_its_page_is_short() -> None:
    assert len((FOLDER / "README.md").read_text(encoding="utf-8").splitlines()) <= 60
