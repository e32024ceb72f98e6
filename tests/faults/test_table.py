"""The table of `docs/faults.md`: each cell struck in a run that takes the way of `roll run`.

A run of all roles takes a while to start, so cells share what they can: one Ray for all runs of a
process; one run for all strikes whose process is replaced; and of those that end a run, each is
the resume of the one before. `make test` strikes `CHOSEN`; `--all-faults` the whole table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from roll.output_dir.trackers import read_records
from tests.faults.table import CHOSEN, NAMES, REPLACED, TARGET, Cell, Kind, Phase, cells, text
from tests.runs import ROOT, write_task
from tests.tiny import char_tokenizer, save_tiny_model

LIMIT_S = 30.0
"""From the strike to the end of everything, for a run that ends; to the loss of the replica, for
one that goes on."""
WHOLE_S = 180.0
"""From the strike to the end of a step that has all replicas again: a new engine starts meanwhile,
and some of what the lost one wrote is written anew."""
SAMPLES = 16
"""Of a step."""
REWARDS: dict[str, Any] = {"digits": {"fn": "test_run_rewards:watched"}}
"""Tells when samples are scored, and takes a while where that is to be seen."""
CALM = {"heartbeat_s": 0.5, "timeout_s": 10, "restart_timeout_s": 120, "max_restarts": 100}


def roles(folder: Path) -> dict[str, Any]:
    """Somebody of each kind but for the engine's own processes."""
    save_tiny_model(folder / "teacher", seed=7)
    save_tiny_model(folder / "model")
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    judge.save_pretrained(folder / "judge")
    char_tokenizer().save_pretrained(folder / "judge")
    loss = [{"kind": "ppo_clip"}, {"kind": "kl", "coef": 0.001}, {"kind": "distill", "coef": 0.5}]
    return {
        "reference": {"pool": "one"},
        "critic": {"pool": "one"},
        "teachers": {"t": {"pool": "one", "model": {"path": str(folder / "teacher")}}},
        "rewards": REWARDS | {"judge": {"model": {"path": str(folder / "judge")}}},
        "algorithm": {"advantage": {"kind": "gae"}, "loss": loss},
    }


def task(folder: Path, kind: Kind) -> Path:
    changes: dict[str, Any] = {
        "rewards": REWARDS,
        "cluster": {"platform": "cpu", "devices_per_node": 2},
        "pools": {"both": "0-1", "one": "0"},
        "actor_train": {"pool": "one", "optimizer": {"lr": 1e-3}},
        "actor_infer": {"pool": "both", "strategy": {"kind": "hf"}},
        "rollout": {
            "max_staleness": 1,
            "siblings": "separate",
            "routing": "least_loaded",  # else each of the few prompts stays where it was moved to
            "health": CALM,
        },
        "validation": {"every": 1, "sets": {"held_out": {"path": str(folder / "held_out.jsonl")}}},
        "checkpoint": {"every": 1, "export_hf": False},
        "track": {"tensorboard": False, "rollouts_every": 1, "rollouts_samples": 2 * SAMPLES},
    }
    folder.mkdir(parents=True)
    if kind in (Kind.CORE, Kind.FORKER):
        vllm = {"pool": "one", "strategy": {"kind": "vllm"}}
        return write_task(folder, **(changes | {"actor_infer": vllm, "reference": {"pool": "one"}}))
    return write_task(folder, **(changes | roles(folder)))


def lines_of(folder: Path, kind: Kind, struck: Sequence[Cell]) -> list[dict[str, Any]]:
    """What the runs have noted; one line for each cell, one for the end."""
    path, notes = task(folder, kind), folder / "notes.jsonl"
    command = [sys.executable, "-m", "tests.faults.struck"]
    command += map(str, (path, notes, *struck))
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
    output = (folder / "log").read_text()[-6000:]
    assert done.returncode == 0, output
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [line["cell"] for line in lines if line["cell"]] == [str(cell) for cell in struck], (
        output
    )
    return lines


def together(cell: Cell) -> str:
    """Which cells share a process."""
    if cell.kind is Kind.RAYLET:
        return str(cell)
    return "vllm" if cell.kind in (Kind.CORE, Kind.FORKER) else "hf"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "struck" not in metafunc.fixturenames:
        return
    wanted = list(cells()) if metafunc.config.getoption("--all-faults") else CHOSEN
    order = sorted(wanted, key=lambda cell: (together(cell), cell.kind not in REPLACED))
    shared = {name: list(found) for name, found in groupby(order, key=together)}
    runs = [
        pytest.param(found, id=name, marks=pytest.mark.xdist_group(name))
        for name, found in shared.items()
    ]
    metafunc.parametrize("struck", runs)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_strike_is_survived_or_named_and_the_run_resumes(
    struck: list[Cell], tmp_path: Path
) -> None:
    *lines, end = lines_of(tmp_path / "run", struck[0].kind, struck)
    assert end["step"] == end["before"] + 1, "the last run, which nobody struck, resumed"
    for file in tmp_path.glob("run/out/rollouts/*"):
        ids = [record["id"] for record in read_records(file)]
        assert len(ids) == len(set(ids)) == SAMPLES, f"{file} has lost samples, or has some twice"
    for cell, line in zip(struck, lines, strict=True):
        if cell.kind in REPLACED:
            assert line["error"] is None, (cell, line)
            assert line["lost_s"] is not None, (cell, line)
            assert line["lost_s"] < LIMIT_S, (cell, line)
            assert line["s"] < WHOLE_S, (cell, line)
        else:
            assert line["error"] is not None, (cell, line)
            assert NAMES[cell.kind] in line["error"], (cell, line)
            assert line["s"] < LIMIT_S, (cell, line)


def test_the_page_is_what_the_table_says() -> None:
    assert TARGET.read_text(encoding="utf-8") == text(), "run: python -m tests.faults.table"


def test_the_chosen_cells_have_every_kind_every_phase_and_both_signals() -> None:
    assert {cell.kind for cell in CHOSEN} == set(Kind)
    assert {cell.phase for cell in CHOSEN} == set(Phase)
    for kind in Kind:
        if len([cell for cell in CHOSEN if cell.kind is kind]) > 1:
            assert len({cell.how for cell in CHOSEN if cell.kind is kind}) == 2, kind
