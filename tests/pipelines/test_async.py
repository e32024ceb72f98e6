"""Runs in which generation is ahead of training: ages, versions, and a buffer that survives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roll.core.errors import ConfigError
from roll.output_dir.trackers import read_records
from roll.pipeline.rlvr import RlvrPipeline
from tests.runs import run_local, write_task


def stale_task(folder: Path, staleness: int, **changes: Any) -> Path:
    """A device for each role; generation is fast, so it gets as far ahead as it may."""
    settings: dict[str, Any] = {
        "pools": {"all": "0", "infer": "1"},
        "actor_infer": {"pool": "infer", "strategy": {"kind": "hf"}},
        "rollout": {"max_staleness": staleness},
        "algorithm": {"correction": {"weight": {"upper": 2.0}}},
        "reference": None,
        "validation": {},
        "max_steps": 6,
    }
    return write_task(folder, **(settings | changes))


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    """The samples that a step trained on."""
    return read_records(folder / f"out/rollouts/step_{step:06d}.jsonl")


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_token_is_older_than_allowed_and_every_step_is_filled(
    tmp_path: Path, staleness: int
) -> None:
    records = run_local(
        stale_task(tmp_path, staleness, track={"tensorboard": False, "rollouts_every": 1})
    )
    steps = [record for record in records if "reward/mean" in record]
    assert len(steps) == 6
    assert all(record["staleness/max"] <= staleness for record in steps)
    assert max(record["staleness/max"] for record in steps) > 0
    for step in range(6):
        rows = [
            json.loads(line) for line in (tmp_path / f"out/rollouts/step_{step:06d}.jsonl").open()
        ]
        assert len(rows) == 16
        assert len({row["id"] for row in rows}) == 16
        assert all(step - row["weight_version"][0] <= staleness for row in rows)


def test_samples_may_start_again_at_new_weights(tmp_path: Path) -> None:
    path = stale_task(tmp_path, 2, rollout={"max_staleness": 2, "in_flight": "restart"})
    run_local(path, ["track.rollouts_every=1"])
    for step in range(6):
        for row in rollouts(tmp_path, step):
            first, last = row["weight_version"]
            assert first == last


def test_roles_that_share_a_device_take_turns_also_when_generation_is_ahead(tmp_path: Path) -> None:
    path = stale_task(
        tmp_path, 1, pools={"all": "0"}, actor_infer={"pool": "all", "strategy": {"kind": "hf"}}
    )
    records = run_local(path)
    assert sum("reward/mean" in record for record in records) == 6


def test_roles_beside_each_other_renew_their_weights_and_never_leave_the_device(
    tmp_path: Path,
) -> None:
    path = stale_task(
        tmp_path, 1, pools={"all": "0"}, actor_infer={"pool": "all", "strategy": {"kind": "hf"}}
    )
    moves: list[str] = []

    def noted(name: str, move: Callable[[], object]) -> None:
        moves.append(name)
        move()

    class Watched(RlvrPipeline):
        """Writes down what moves a role."""

        def open(self) -> None:
            super().open()
            residents = self.runtime.colocation.residents
            for name, own in residents.items():
                onload, offload = (partial(noted, name, m) for m in (own.onload, own.offload))
                residents[name] = replace(own, onload=onload, offload=offload)

    settings = ["cluster.colocate=beside", "track.verify_weights=always", "max_steps=4"]
    records = run_local(path, settings, pipeline=Watched)
    steps = [record for record in records if "reward/mean" in record]
    assert len(steps) == 4
    assert moves == []
    # Engines write meanwhile, and each push has brought the newest weights, which it verifies.
    assert [record["staleness/max"] for record in steps] == [0, 1, 1, 1]


def test_a_resumed_run_trains_on_what_waited_in_the_buffer(tmp_path: Path) -> None:
    path = stale_task(tmp_path, 2, checkpoint={"every": 3, "export_hf": False})
    # Training takes so long that groups end meanwhile.
    slow = "actor_train.epochs=20"
    run_local(path, ["max_steps=3", "track.rollouts_every=1", slow])
    saved = json.loads((tmp_path / "out/checkpoints/step_000003/state.json").read_text())
    waiting = saved["sampler"]["scheduler"]["waiting"]
    assert waiting, "no group was ahead of training"
    run_local(path, ["max_steps=6", "track.rollouts_every=1", slow])
    trained = {row["id"] for step in (3, 4, 5) for row in rollouts(tmp_path, step)}
    for row in waiting:
        assert {sample["id"] for sample in row["group"]["samples"]} <= trained


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ({"redundant_samples": 2}, "rollout.siblings=separate"),
        ({"in_flight": "restart"}, "nothing is in flight when new weights come"),
        (
            {"health": {"heartbeat_s": 5, "timeout_s": 1}},
            "the 5 s between two heartbeats",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, rollout: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run_local(write_task(tmp_path, rollout=rollout))
