"""Games against an opponent: runs that must be equal are, to the last digit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pipelines.test_agentic import task
from tests.runs import run_local, without_times

GAME = {"env": "test_run_envs:Duel", "seats": 2, "trained_seats": "one", "cut_turn": "go_on"}
ENGINE = {"pool": "all", "strategy": {"kind": "hf"}}
VALIDATED = {"every": 2, "sets": {"held_out": {"seeds": 4, "first_seed": 1000, "tag": "words"}}}


def records(folder: Path, opponent: dict[str, Any] | None) -> list[dict[str, float]]:
    """What a run says in its steps, without what it says of the opponent."""
    named = {} if opponent is None else {"opponent": "past"}
    more: dict[str, Any] = {"validation": VALIDATED if opponent else {}}
    if opponent is not None:
        own = {"model": {"path": str(folder / "model")}} if opponent == {} else opponent
        more["opponents"] = {"past": {**ENGINE, **own}}
    path = task(
        folder,
        environment=GAME | named,
        actor_train={"pool": "all", "optimizer": {"lr": 5e-2}},
        track={"tensorboard": False, "rollouts_every": None, "verify_weights": "always"},
        **more,
    )
    found = run_local(path, ["max_steps=4", "data.samples_per_prompt=8", "checkpoint.every=100"])
    steps = [without_times(record) for record in found if "loss/total" in record]
    assert len(steps) == 4
    return steps


def told(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    hidden = ("opponents/", "val/", "memory/", "perf/")
    return [{k: v for k, v in each.items() if not k.startswith(hidden)} for each in steps]


def test_an_opponent_has_the_weights_of_the_step_that_the_config_says(tmp_path: Path) -> None:
    itself = records(tmp_path / "itself", None)
    newest = records(tmp_path / "newest", {"every": 1})
    every_2 = records(tmp_path / "every_2", {"every": 2})
    oldest = records(tmp_path / "oldest", {"every": 100})
    frozen = records(tmp_path / "frozen", {})
    versions = {
        name: [each["opponents/past/version"] for each in steps]
        for name, steps in (("newest", newest), ("every_2", every_2), ("oldest", oldest))
    }
    assert versions == {
        "newest": [0, 1, 2, 3],
        "every_2": [0, 0, 2, 2],
        "oldest": [0, 0, 0, 0],
    }
    assert told(newest) == told(itself), "the policy as it is"
    assert told(oldest) == told(frozen), "the model that the run started from"
    assert told(every_2)[:2] == told(oldest)[:2]
    assert told(every_2)[2] != told(oldest)[2]
    assert told(newest)[1] != told(oldest)[1]
    assert any("val/held_out/mean@1" in each for each in every_2), "validation plays, too"
    for step in oldest:
        assert step["mismatch/logprob_abs_max"] < 1e-5
        assert step["samples/left_out"] == 0
