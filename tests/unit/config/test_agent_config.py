"""Settings of agentic runs: none is ignored, and what a run writes down can be run itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.sections.environment import EnvironmentConfig, TaskSource
from tests.pipelines.test_agentic import task


@pytest.mark.parametrize("environment", [{}, {"env": None, "agent": "test_run_agent:run"}])
def test_the_config_that_a_run_writes_down_can_be_run_itself(
    environment: dict[str, Any], tmp_path: Path
) -> None:
    config = load_config(task(tmp_path, environment=environment)).config
    again = tmp_path / "config.yaml"
    again.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert load_config(again).config == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 3}, "`limit` is for a file of tasks, not for `seeds`"),
        ({"split": "test"}, "`split` is for a file of tasks"),
        ({"columns": {"tag": "level"}}, "`columns` is for a file of tasks"),
        ({"system": "Be brief."}, "`system` is put before prompts"),
    ],
)
def test_a_setting_that_tasks_made_of_seeds_do_not_have_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        TaskSource.model_validate({"seeds": 5, **settings})


def test_a_file_of_tasks_has_the_settings_of_files_but_no_system_message() -> None:
    assert TaskSource(path="a.jsonl", limit=3, split="test").limit == 3
    with pytest.raises(ValidationError, match="`system` is put before prompts"):
        TaskSource(path="a.jsonl", system="Be brief.")


def test_agents_are_not_held_back_and_a_limit_on_them_is_refused() -> None:
    with pytest.raises(ValidationError, match="`concurrency` is for `env`"):
        EnvironmentConfig(agent="a:b", concurrency=4)
    assert EnvironmentConfig(env="frozen_lake", concurrency=4).concurrency == 4


def test_a_limit_of_prompts_is_refused_where_episodes_have_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an episode has one limit"):
        load_config(task(tmp_path), ["data.max_prompt_tokens=5"])


def test_pictures_are_refused_where_episodes_have_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.pictures: episodes have no pictures"):
        load_config(task(tmp_path), ["data.pictures.workers=1"])
    with pytest.raises(ValidationError, match="take no pictures"):
        TaskSource.model_validate({"path": "a.jsonl", "columns": {"images": "images"}})
