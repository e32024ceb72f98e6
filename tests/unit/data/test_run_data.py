"""Data of a run: no prompt of validation has the name of one of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.commands.launch import PIPELINES
from roll.config import load_config
from roll.core.errors import ConfigError, DataError
from roll.runtime.run_data import RunData
from tests.pipelines.test_agentic import task
from tests.pipelines.test_rows import PAIRS, split
from tests.runs import write_rows_task, write_task


def loaded(path: Path) -> RunData[Any]:
    config = load_config(path).config
    data: RunData[Any] = PIPELINES[config.pipeline].prepare(config)[1]
    return data


@pytest.mark.parametrize(
    ("pipeline", "trained"),
    [("rlvr", "train"), ("agentic", "words"), ("dpo", "train")],
)
def test_a_validation_set_with_the_name_of_a_training_source_has_other_ids(
    pipeline: str, trained: str, tmp_path: Path
) -> None:
    """Requests and episodes of training and of validation may run at the same time, by name."""
    sets: list[Any] = [{"path": str(tmp_path / "held_out.jsonl")}] * 2
    if pipeline == "agentic":
        sets = [{"seeds": 3, "first_seed": first, "tag": "words"} for first in (1000, 2000)]
    validation = {"every": 2, "sets": dict(zip((trained, "other"), sets, strict=True))}
    if pipeline == "dpo":
        extra = {"validation": validation, "reference": {"pool": "all"}}
        path = write_rows_task(tmp_path, "dpo", split(PAIRS), **extra)
    else:
        write = task if pipeline == "agentic" else write_task
        path = write(tmp_path, validation=validation)
    data = loaded(path)
    trained_ids = {one.id for one in data.train.items}
    assert all(one.startswith(f"{trained}:") for one in trained_ids)
    assert trained_ids.isdisjoint(one.id for one in data.held_out.items)
    found = {source.name: source.items for source in data.held_out.sources}
    assert found.keys() == {trained, "other"}, "metrics keep the names of the config"
    assert all(one.id.startswith(f"val/{trained}:") for one in found[trained])
    assert all(one.id.startswith("other:") for one in found["other"]), "as in earlier versions"


@pytest.mark.parametrize("pipeline", ["rlvr", "agentic", "dpo"])
def test_a_variable_that_the_chat_template_does_not_mention_is_refused(
    pipeline: str, tmp_path: Path
) -> None:
    told = {"chat_template": True, "chat_template_kwargs": {"add_generation_promt": False}}
    if pipeline == "dpo":
        path = write_rows_task(tmp_path, "dpo", split(PAIRS), reference={"pool": "all"})
    else:
        path = (task if pipeline == "agentic" else write_task)(tmp_path)
    config = yaml.safe_load(path.read_text())
    config["data"] |= told
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"kwargs\.add_generation_promt.*'add_generation_prompt'"):
        loaded(path)


def test_a_tag_of_domains_that_no_task_has_is_told(tmp_path: Path) -> None:
    rows = tmp_path / "tasks.jsonl"
    rows.write_text('{"prompt": "go", "answer": "7", "kind": "words"}\n')
    source = {"path": str(rows), "columns": {"tag": "kind"}}
    environment = {"tags": ["words", "others"]}
    path = task(tmp_path, environment=environment, domains={"others": {"filters": []}})
    config = load_config(path, [f"data.sources=[{json.dumps(source)}]"]).config
    with pytest.raises(DataError, match=r"domains\.others: no training prompt has the tag"):
        PIPELINES[config.pipeline].prepare(config)
