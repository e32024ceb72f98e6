"""Every example of docs/extend.md is read as a user's, and keeps the contract of its kind."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import roll.testing
from roll.commands.trials.parts import own_parts, try_parts
from roll.commands.trials.result import Trial
from roll.config import load_config
from roll.config.user_code.import_path import load_object, searched_first
from roll.core.batches import RolloutBatch
from roll.testing import check_loss_term, check_tracker
from tests.runs import write_task

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
MODULES = {
    code.splitlines()[0].removeprefix("# "): code
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}
"""File name -> code."""
SETTINGS: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a run file and every module of the page."""
    write_task(tmp_path)
    for name, code in MODULES.items():
        (tmp_path / name).write_text(code)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)


def merged(below: Any, over: Any) -> Any:
    """Mappings are merged, other values replaced, as files over `defaults` are."""
    if not (isinstance(below, dict) and isinstance(over, dict)):
        return over
    return below | {key: merged(below.get(key), value) for key, value in over.items()}


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_every_run_file_of_the_page_is_valid(folder: Path, number: int) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(merged(yaml.safe_load(path.read_text()), SETTINGS[number])))
    trial = Trial()
    config = load_config(path).config
    with searched_first(folder):
        try_parts(config, trial)
    assert trial.wrong == []
    assert trial.remarks == []
    trackers = [tracker for tracker in config.track.trackers if ":" in tracker.kind]
    assert len(trial.told) == len(list(own_parts(config))) + len(trackers)


def test_the_tracker_of_the_page_keeps_the_contract(folder: Path) -> None:
    with searched_first(folder):
        check_tracker(load_object("my_tracker:Table"), kwargs={"digits": 3})


def test_the_loss_of_the_page_keeps_the_contract_with_other_options(folder: Path) -> None:
    with searched_first(folder):
        check_loss_term(load_object("my_loss:Truncated")(limit=1.1))


def test_the_advantage_of_single_tokens_fades_as_it_says(folder: Path) -> None:
    with searched_first(folder):
        fading = load_object("my_token_advantage:Fading")(gamma=0.5)
    batch = RolloutBatch(
        tokens=torch.zeros(2, 4, dtype=torch.long),
        lengths=torch.tensor([4, 3]),
        loss_mask=torch.tensor([[False, True, True, True], [False, False, True, False]]),
        sample_ids=["0/0", "0/1"],
        tags=["t", "t"],
        group_ids=torch.tensor([0, 0]),
        rewards=torch.tensor([1.0, 0.0]),
    )
    found_BT = fading(batch).inside(batch.loss_mask).advantages_BT
    assert found_BT.tolist() == [[0.0, 0.125, 0.25, 0.5], [0.0, 0.0, -0.5, 0.0]]


def test_every_check_is_named_on_the_page() -> None:
    for name in roll.testing.__all__:
        assert f"`{name}`" in PAGE, name
