"""Code that a run file names is imported and compared with its arguments before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.commands.launch import launch
from roll.commands.trials.trial import try_out
from roll.commands.trials.user_code import wrong_code
from roll.config import load_config
from roll.config.user_code.arguments import check_types
from roll.config.user_code.import_path import searched_first
from roll.core.errors import ConfigError
from roll.pipeline.rlvr import RlvrPipeline
from roll.rewards.api import RewardContext
from roll.rewards.loading import load_reward
from tests.pipelines.test_agentic import task as agentic_task
from tests.runs import write_task

MODULE = """\
from __future__ import annotations
from typing import TYPE_CHECKING, Literal
from roll.workers.reward import RewardWorker
if TYPE_CHECKING:
    from roll.core.types import Sample

def mine(sample: Sample, limit: float = 1.0, names: tuple[str, ...] = (), mode: Mode = "a",
         way: Literal["up", "down"] = "up", few: int = None, other: Sample = None, **rest: int):
    return 1.0

def counted(sample, limit):
    return 1.0

class Table(RewardWorker):
    async def setup(self, ctx, size: int):
        pass

    def score(self, sample, ctx):
        return 1.0

class Tracker:
    def __init__(self, run, digits: int = 2): ...
    def log(self, step, record): ...
    def close(self): ...

def kept(group, least: float): ...
def row(values, more): ...
def maker(size: int): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the module `my_code`, which is forgotten afterwards."""
    (tmp_path / "my_code.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("my_code", None)


def wrong(folder: Path, **changes: Any) -> list[str]:
    config = load_config(write_task(folder, **changes)).config
    return [str(error) for error in wrong_code(config, folder)]


def own(**kwargs: Any) -> dict[str, Any]:
    return {"mine": {"fn": "my_code:mine", "kwargs": kwargs}}


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"limit": "0.5"}, ".limit: found '0.5'; input should be a valid number"),
        ({"limit": True}, ".limit: found True; input should be a valid number"),
        ({"names": ["a", 3]}, ".names.1: found 3; input should be a valid string"),
        ({"names": "a"}, ".names: found 'a'; input should be a valid array"),
        ({"way": "left"}, ".way: found 'left'; input should be 'up' or 'down'"),
        ({"few": 1.5}, ".few: found 1.5; input should be a valid integer"),
        ({"some": "x"}, ".some: found 'x'; input should be a valid integer"),
    ],
)
def test_a_value_of_another_type_is_refused(
    folder: Path, kwargs: dict[str, Any], told: str
) -> None:
    with searched_first(folder), pytest.raises(ConfigError) as caught:
        load_reward("my_code:mine", kwargs, RewardContext("mine", seed=0))
    assert str(caught.value) == f"rewards.mine.kwargs{told}"


def test_values_as_yaml_writes_them_are_taken(folder: Path) -> None:
    kwargs = {"limit": 2, "names": ["a"], "mode": 3, "few": None, "other": {"a": 1}, "some": 1}
    with searched_first(folder):
        load_reward("my_code:mine", kwargs, RewardContext("mine", seed=0))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1, "x"], "k.limit.1: found 'x'; input should be a valid integer"),
        ("x", "k.limit: found 'x'; input should be a valid integer; or input should be a valid"),
    ],
)
def test_members_of_a_union_are_no_keys(value: object, told: str) -> None:
    def fn(sample: object, limit: int | list[int] = 3) -> None: ...

    with pytest.raises(ConfigError) as caught:
        check_types(fn, {"limit": value}, "k")
    assert str(caught.value).startswith(told)
    check_types(fn, {"limit": [1, 2]}, "k")


def test_code_of_all_kinds_is_looked_at_and_all_mistakes_are_told(folder: Path) -> None:
    source = {"path": str(folder / "train.jsonl"), "fn": "my_code:row"}
    base = {"prompts_per_step": 4, "samples_per_prompt": 4, "max_prompt_tokens": 32}
    said = wrong(
        folder,
        rewards={
            "counted": {"fn": "my_code:counted"},
            "table": {"worker": "my_code:Table", "kwargs": {"size": "big"}},
            "gone": {"fn": "my_code:gone"},
        },
        track={"trackers": [{"kind": "my_code:Tracker", "kwargs": {"digits": "2"}}]},
        rollout={"filters": [{"kind": "custom", "fn": "my_code:kept", "kwargs": {"least": "x"}}]},
        data={"sources": [source], **base},
    )
    starts = [
        "track.trackers.0.kwargs.digits: found '2'",
        f"{folder}/train.jsonl: fn: my_code:row: missing a required argument: 'more'",
        "rollout.filters.0.kwargs.least: found 'x'",
        "rewards.counted.kwargs: my_code:counted needs 'limit'",
        "rewards.gone: 'my_code:gone': my_code has no 'gone'",
        "rewards.table.kwargs.size: found 'big'",
    ]
    assert [line[: len(start)] for line, start in zip(said, starts, strict=True)] == starts


def test_environments_are_looked_at(folder: Path) -> None:
    path = agentic_task(folder)
    environment = "environments.words={env: 'my_code:maker', kwargs: {size: '4'}, tags: [words]}"
    [error] = wrong_code(load_config(path, [environment]).config, folder)
    assert str(error).startswith("environments.words.kwargs.size: found '4'")


def test_an_import_that_fails_shows_the_line_of_the_user(folder: Path) -> None:
    (folder / "my_broken.py").write_text("import os\n\nraise SystemError('no table here')\n")
    [said] = wrong(folder, rewards={"mine": {"fn": "my_broken:mine"}})
    first, *rest = said.splitlines()
    assert first == "rewards.mine: importing my_broken failed"
    assert f'{folder}/my_broken.py", line 3' in rest[1]
    assert rest[-1] == "SystemError: no table here"


def test_a_reward_is_imported_with_its_variables(folder: Path) -> None:
    text = "import os\nURL = os.environ['URL_OF_MINE']\ndef mine(sample): return 1.0\n"
    (folder / "my_server.py").write_text(text)
    reward = {"fn": "my_server:mine", "env": {"URL_OF_MINE": "http://x"}}
    assert wrong(folder, rewards={"mine": reward}) == []
    [said] = wrong(folder, rewards={"mine": {"fn": "my_server:mine"}})
    assert said.endswith("KeyError: 'URL_OF_MINE'")


def test_workers_on_other_machines_import_for_themselves(folder: Path) -> None:
    (folder / "my_broken.py").write_text("import a_package_that_is_elsewhere\n")
    found = wrong(
        folder,
        rewards={"mine": {"fn": "my_broken:mine"}},
        track={"trackers": [{"kind": "my_code:Tracker", "kwargs": {"digits": "2"}}]},
        cluster={"address": "head:6379"},
    )
    assert [line.partition(":")[0] for line in found] == ["track.trackers.0.kwargs.digits"]


class Unprepared(RlvrPipeline):
    """Nothing of it may be called."""

    @classmethod
    def prepare(cls, config: Any) -> Any:
        raise AssertionError("the data is read after the code was looked at")


def test_a_run_and_a_check_refuse_it_before_all_else(folder: Path) -> None:
    loaded = load_config(write_task(folder, rewards=own(limit="0.5")))
    with pytest.raises(ConfigError, match=r"rewards.mine.kwargs.limit: found '0.5'"):
        launch(loaded, {"rlvr": Unprepared})
    assert not (folder / "out").exists()
    trial = try_out(loaded.config, folder)
    assert [str(error) for error in trial.wrong] == [
        "rewards.mine.kwargs.limit: found '0.5'; input should be a valid number"
    ]
    assert trial.told == []
