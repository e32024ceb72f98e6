"""The page on agents: its environment and its run file work as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from roll.config import load_config
from roll.envs.built_in.boards.frozen_lake import FrozenLake
from roll.envs.loading import ENVS

PAGE = (Path(__file__).parents[2] / "docs/agents.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The first block of the page in this language."""
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0])


def test_the_environment_of_the_page_can_be_played() -> None:
    names: dict[str, Any] = {}
    exec(block("python"), names)
    env = names["GuessTheNumber"](most=50)
    said, _ = env.reset(seed=3)
    assert "1 to 50" in said
    low, high, over = 1, 50, False
    while not over:
        guess = (low + high) // 2
        said, reward, over, cut, info = env.step(f"I say {guess}.")
        low, high = (guess + 1, high) if said == "Larger." else (low, guess - 1)
    assert (reward, cut, info) == (1.0, False, {"success": True})
    assert env.step("?")[0] == "Larger."


def test_the_run_file_of_the_page_is_valid(tmp_path: Path) -> None:
    rest = {
        "output_dir": "out",
        "max_steps": 1,
        "model": {"path": "model"},
        "pools": {"all": "0"},
        "actor_train": {"pool": "all", "optimizer": {"lr": 1e-4}},
        "actor_infer": {"pool": "all", "strategy": {"kind": "hf"}},
        "algorithm": {"advantage": {"kind": "grpo"}, "loss": [{"kind": "ppo_clip"}]},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(block("yaml")) | rest))
    assert load_config(path).config.pipeline == "agentic"


def test_every_built_in_environment_is_on_the_page() -> None:
    for name in ENVS:
        assert f"`{name}`" in PAGE or f" {name}" in PAGE, name
    assert ENVS["frozen_lake"] is FrozenLake
