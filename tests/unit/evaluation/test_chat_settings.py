"""What `roll chat` takes from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.commands.chat.command import Wish, config_of
from roll.commands.chat.judging import Judges, Question
from roll.commands.chat.session import piped_lines
from roll.commands.eval.models import Examinee
from roll.config import load_config
from roll.core.errors import ConfigError
from roll.rewards.contract import sample_of
from tests.pipelines.test_rows import PAIRS, TEXTS, split
from tests.runs import write_rows_task, write_task

ROWS: dict[str, list[Any]] = {"sft": TEXTS, "dpo": PAIRS, "reward_model": PAIRS}


def settings(folder: Path, pipeline: str, *overrides: str, **data: Any) -> Any:
    """The settings of a chat with a run that has these settings of its data."""
    told = [f"data.{name}={value}" for name, value in data.items()]
    if pipeline == "rlvr":
        path = write_task(folder)
    else:
        extra = {"reference": {"pool": "all"}} if pipeline == "dpo" else {}
        path = write_rows_task(folder, pipeline, split(ROWS[pipeline]), **extra)
    run = load_config(path, told, import_code=False).config
    return config_of(Wish("run", overrides), Examinee("run", str(folder / "model")), run).data


@pytest.mark.parametrize("pipeline", ["rlvr", "sft", "dpo", "reward_model"])
def test_a_chat_makes_its_prompts_as_the_run_does(pipeline: str, tmp_path: Path) -> None:
    assert settings(tmp_path, pipeline, chat_template="false").chat_template is False
    found = settings(tmp_path, pipeline, chat_template_kwargs="{thinking: false}")
    assert found.chat_template_kwargs == {"thinking": False}
    assert settings(tmp_path, pipeline).chat_template is True


def test_lines_of_windows_are_read_as_they_are_meant() -> None:
    assert list(piped_lines(["\ufeffa\r\n", "\n", " b \n", "c"])) == ["a", "", " b ", "c"]


def test_a_template_of_the_users_is_refused_until_another_is_named(tmp_path: Path) -> None:
    own = {"chat_template": "{kind: 'nowhere:Plain', indent: 2}"}
    with pytest.raises(ConfigError, match=r"'nowhere:Plain'.*set data\.chat_template=true"):
        settings(tmp_path, "rlvr", "data.chat_template_kwargs={}", **own)
    assert settings(tmp_path, "sft", "data.chat_template=true", **own).chat_template is True


def test_rewards_have_the_weights_of_the_tag(tmp_path: Path) -> None:
    rewards = {name: {"fn": "exact", "weight": 0.25} for name in ("one", "two")}
    own = {"default": {"rewards": {"two": 0.5}}}
    path = write_task(tmp_path, rewards=rewards, domains=own, validation={})
    judges = Judges(load_config(path).config, tmp_path)
    found = judges.judge(
        Question("1+1=", "2"), "1+1=", [1], sample_of("2", answer="2").completion, "2"
    )
    weights = [(one.reward, one.weight, one.score) for one in found]
    assert weights == [("one", 0.25, 1.0), ("two", 0.5, 1.0)]


def test_a_chat_has_no_settings_of_evaluations(tmp_path: Path) -> None:
    for unread in ("health.timeout_s=3", "max_in_flight_groups=8"):
        with pytest.raises(ConfigError, match="unknown key"):
            settings(tmp_path, "rlvr", unread)
