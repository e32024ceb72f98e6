"""`roll check` says where the programs of a run would run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.commands.trials.result import Trial
from roll.commands.trials.sandboxes import try_sandboxes
from roll.config.loading.compose import load_config
from roll.config.rlvr_base import RlvrBase

ROOT = Path(__file__).parents[3]


def tried(**sandboxes: object) -> Trial:
    """Try a run with a reward `code` for each of these settings of a sandbox."""
    given = {
        name: {"fn": "code", "kwargs": {"sandbox": settings}, "tags": ["sort"]}
        for name, settings in sandboxes.items()
    }
    quickstart = ROOT / "examples" / "rlvr_quickstart" / "run.yaml"
    config = load_config(quickstart, [f"rewards={json.dumps(given)}"]).config
    assert isinstance(config, RlvrBase)
    trial = Trial()
    try_sandboxes(config, trial)
    return trial


def test_the_level_of_each_sandbox_is_told_once() -> None:
    trial = tried(a={"level": "strict"}, b={"level": "strict"}, c={"level": "landlock"})
    assert trial.wrong == []
    assert trial.told == [
        "rewards.a.kwargs.sandbox, rewards.b.kwargs.sandbox: programs run at level strict",
        "rewards.c.kwargs.sandbox: programs run at level landlock",
    ]


def test_a_run_without_programs_opens_no_sandbox() -> None:
    assert tried() == Trial()


def test_no_isolation_is_remarked() -> None:
    with pytest.warns(UserWarning, match="level `none`"):
        trial = tried(a={"level": "none"})
    assert trial.remarks == ["rewards.a.kwargs.sandbox: level `none` isolates nothing"]


def test_hosts_that_do_not_answer_are_wrong() -> None:
    trial = tried(a={"level": "remote", "remote": {"urls": ["http://127.0.0.1:1"]}})
    assert trial.told == []
    (error,) = trial.wrong
    assert str(error).startswith("rewards.a.kwargs.sandbox: the level `remote` does not work")
