"""Settings of agentic runs: what a run writes down can be run itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config import load_config
from roll.config.errors import ConfigError
from tests.pipelines.test_agentic import task


@pytest.mark.parametrize("environment", [{}, {"env": None, "agent": "test_run_agent:run"}])
def test_the_config_that_a_run_writes_down_can_be_run_itself(
    environment: dict[str, Any], tmp_path: Path
) -> None:
    config = load_config(task(tmp_path, environment=environment)).config
    again = tmp_path / "config.yaml"
    again.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert load_config(again).config == config


def test_a_limit_of_prompts_is_refused_where_episodes_have_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an episode has one limit"):
        load_config(task(tmp_path), ["data.max_prompt_tokens=5"])
