"""docs/rewards.md names every built-in reward, and every config on it works."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config.sections.reward import RewardConfig
from roll.rewards.api import RewardContext
from roll.rewards.built_in import REWARDS
from roll.rewards.contract import check_reward, sample_of
from roll.rewards.loading import load_reward

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\| `(\{.*\})` \|", PAGE, re.MULTILINE)
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def _load(name: str, settings: dict[str, Any]) -> str:
    config = RewardConfig.model_validate_json(json.dumps(settings))
    if config.fn is None or ":" in config.fn:
        return ""
    load_reward(config.fn, config.kwargs, RewardContext(name, seed=0))
    return config.fn


def test_the_table_has_a_line_for_every_built_in_reward() -> None:
    named = {_load("line", yaml.safe_load(line)) for line in LINES}
    assert named == set(REWARDS)


def test_every_function_of_the_page_keeps_the_contract() -> None:
    made: dict[str, Any] = {}
    for code in CODE:
        exec(compile(code, "docs/rewards.md", "exec"), made)
    check_reward(made["right_and_brief"], kwargs={"limit": 100}, answer="4")
    check_reward(made["diverse"], kwargs={"share": 0.5}, per="group")
    group = [sample_of(text, answer="") for text in ("so\n4", "4", "5")]
    assert [each.score for each in made["diverse"](group)] == pytest.approx([1 / 3, 1 / 3, 2 / 3])


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.startswith("rewards:")])
def test_every_config_of_the_page_is_valid(block: str) -> None:
    rewards = yaml.safe_load(block)["rewards"]
    assert rewards
    for name, settings in rewards.items():
        _load(name, settings)
