"""Rewards are tried on a row before a run starts, and their faults begin with the user's line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.commands.trials.result import Trial
from roll.commands.trials.rewards import try_rewards
from roll.config.sections.reward import RewardConfig
from roll.config.user_code.tracebacks import users_traceback
from roll.core.types import Prompt

MODULE = """
import os
from roll.rewards.api import Reward
from roll.workers.reward import RewardWorker

def right(sample):
    return Reward(float(sample.answer in sample.response_text), {"column": sample.extra["level"]})

def missing_return(sample):
    sample.response_text == sample.answer

def raises(sample):
    return helper(sample)

def helper(sample):
    return sample.extra["nowhere"]

async def hangs(sample):
    while True:
        pass

def prints(sample):
    print("hello")
    return 1

def reads(sample):
    return len(os.environ["TABLE_OF_MINE"])

class Table(RewardWorker):
    async def setup(self, ctx, size):
        self.size = size

    def score(self, sample, ctx):
        return self.size

class Broken(RewardWorker):
    async def setup(self, ctx):
        open("/no/such/file")

    def score(self, sample, ctx):
        return 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    (folder / "tried_rewards.py").write_text(MODULE)
    return folder


def _tried(folder: Path, **rewards: RewardConfig) -> Trial:
    row = Prompt("s:0", (1,), "2+2?", "so it is\n4", "default", {"level": 3})
    trial = Trial(rows={"default": row})
    try_rewards(rewards, folder, trial)
    return trial


def _fn(name: str, **settings: object) -> RewardConfig:
    return RewardConfig.model_validate({"fn": f"tried_rewards:{name}", **settings})


@pytest.mark.slow
def test_what_a_reward_gives_is_told(folder: Path) -> None:
    table = RewardConfig(worker="tried_rewards:Table", kwargs={"size": 7})
    reads = _fn("reads", env={"TABLE_OF_MINE": "four"})
    trial = _tried(folder, mine=_fn("right"), prints=_fn("prints"), table=table, reads=reads)
    assert trial.wrong == []
    assert trial.told == [
        "rewards.mine: 0 for the response '4' to row s:0 (column 3)",
        "rewards.prints: 1 for the response '4' to row s:0",
        "rewards.table: 7 for the response '4' to row s:0",
        "rewards.reads: 4 for the response '4' to row s:0",
    ]


def test_a_raise_and_a_missing_return_are_faults_and_show_the_users_line_first(
    folder: Path,
) -> None:
    broken = RewardConfig(worker="tried_rewards:Broken")
    trial = _tried(folder, bad=_fn("raises"), none=_fn("missing_return"), broken=broken)
    bad, none, setup = (str(error) for error in trial.wrong)
    lines = bad.splitlines()
    assert lines[0].startswith("rewards.bad: tried_rewards:raises fails on row s:0")
    assert lines[1] == "Traceback (most recent call last):"
    assert 'tried_rewards.py", line' in lines[2]
    assert "in raises" in lines[2]
    assert lines[-1] == "KeyError: 'nowhere'"
    assert "score is None; is a `return` missing?" in none
    assert "No such file" in setup
    assert 'tried_rewards.py", line' in setup.splitlines()[2]


def test_a_reward_that_hangs_is_killed_and_told(folder: Path) -> None:
    trial = _tried(folder, slow=_fn("hangs", timeout_s=0.3))
    said = str(trial.wrong[0])
    assert "gave nothing on row s:0 within 0.3 s; mend it or raise rewards.slow.timeout_s" in said


def test_rewards_of_tags_without_rows_and_reward_models_are_not_tried(folder: Path) -> None:
    other = _fn("raises", tags=("other",))
    model = RewardConfig.model_validate({"model": {"path": "m"}})
    trial = _tried(folder, other=other, model=model)
    assert (trial.told, trial.wrong) == ([], [])
    assert trial.untried == ["rewards.other (no row)", "rewards.model (a model)"]


def test_frames_of_the_framework_above_the_users_are_not_shown() -> None:
    try:
        try:
            json.loads("{")
        except ValueError as error:
            raise KeyError("no such column") from error
    except KeyError as error:
        told = users_traceback(error)
    assert told.count("test_reward_trial.py") == 2
    assert told.endswith("KeyError: 'no such column'")
