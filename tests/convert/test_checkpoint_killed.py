"""Whoever is killed while a checkpoint is written, the one before stays whole and goes on."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from mcore_adapter.checkpoint_reader import WEIGHT, Saved
from mcore_adapter.convert.conversion_plan import tasks
from mcore_adapter.load import read_config
from mcore_adapter.models import table_of
from mcore_adapter.optimizer_state import MOMENTS
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.learner import Learner
from tests.convert.spawned import run_ranks, start_ranks
from tests.convert.tiny_models import save_model

MOMENTS_OF_DEATH = [
    # rank, and before the how manieth call of a function of this name
    (0, "mkdir", 1),
    (1, "truncate", 1),
    (0, "pwrite", 1),
    (1, "pwrite", 20),
    (0, "fsync", 1),
    (0, "write_text", 1),
    (0, "rename", 1),
]


def first(folder: Path, kept: Path) -> float | None:
    """Writes the checkpoint before; the loss after it."""
    learner = Learner.build(folder, ParallelSizes(), distributed=True)
    learner.backward()
    learner.step()
    learner.save(kept, number=1)
    return learner.backward()


def resume(folder: Path, kept: Path, sizes: ParallelSizes) -> float | None:
    learner = Learner.build(folder, sizes, distributed=True)
    assert learner.restore(kept) == {"number": 1}
    return learner.backward()


def die_saving(folder: Path, kept: Path, new: Path, moment: tuple[int, str, int] | None) -> None:
    learner = Learner.build(folder, ParallelSizes(), distributed=True)
    learner.restore(kept)
    learner.backward()
    learner.step()
    if moment is not None and moment[0] == dist.get_rank():
        _die_before(*moment[1:])
    learner.save(new, number=2)


def _die_before(name: str, count: int) -> None:
    calls = itertools.count(1)

    def look(frame: FrameType, event: str, function: Any) -> None:
        called = function.__name__ if event == "c_call" else frame.f_code.co_name
        if event in ("call", "c_call") and called == name and next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(look)


@pytest.mark.slow
def test_a_rank_that_dies_leaves_the_checkpoint_before_whole(tmp_path: Path) -> None:
    folder, kept, new = save_model(tmp_path, "qwen3"), tmp_path / "kept", tmp_path / "new"
    expected = run_ranks(first, 2, folder, kept)
    for moment in MOMENTS_OF_DEATH:
        processes, _ = start_ranks(die_saving, 2, _fresh(tmp_path), folder, kept, new, moment)
        for process in processes:
            process.join(120)
        assert processes[moment[0]].exitcode == -signal.SIGKILL, moment
        assert not new.exists(), moment
        left = [path.name for path in tmp_path.glob(".new.partial-*")]
        assert moment[1] == "mkdir" or moment[0] != 0 or left, "it was killed too early"
    assert run_ranks(resume, 2, folder, kept, ParallelSizes()) == expected
    assert run_ranks(resume, 1, folder, kept, ParallelSizes()) == pytest.approx(
        expected[:1], rel=1e-6
    )
    # The next one to be written clears up.
    run_ranks(die_saving, 2, folder, kept, new, None)
    assert Saved(new, table_of(read_config(folder))).extra == {"number": 2}
    assert not list(tmp_path.glob(".*"))


def save_for_ever(folder: Path, kept: Path) -> None:
    learner = Learner.build(folder, ParallelSizes(tp=2))
    for number in itertools.count():
        learner.backward()
        learner.step()
        learner.save(kept / str(number), number=number)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_checkpoints_are_whole_or_absent_whenever_their_writers_die(
    seed: int, tmp_path: Path
) -> None:
    """All ranks, or one, at a random moment of a random save."""
    dice = random.Random(seed)
    folder, kept = save_model(tmp_path, "qwen3"), tmp_path / "kept"
    processes, _ = start_ranks(save_for_ever, 2, _fresh(tmp_path), folder, kept)
    wanted = str(dice.randrange(1, 4))
    deadline = time.monotonic() + 120
    while not list(kept.glob(f".{wanted}.partial-*")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(dice.uniform(0.0, 0.03))
    for process in processes if seed % 2 else [dice.choice(processes)]:
        process.kill()
    for process in processes:
        process.join(120)
    found = sorted(int(path.name) for path in kept.glob("[0-9]*"))
    assert found == list(range(len(found)))
    assert found[-1] >= int(wanted) - 1
    table = table_of(read_config(folder))
    for number in found:
        saved = Saved(kept / str(number), table)
        assert saved.extra == {"number": number}
        assert saved.step == number + 1
        for task in tasks(table, ParallelSizes()):
            for kind in (WEIGHT, *MOMENTS):
                assert saved.full(task, kind).isfinite().all()


def _fresh(folder: Path) -> Path:
    """A new folder."""
    made = folder / f"ranks{len(list(folder.glob('ranks*')))}"
    made.mkdir()
    return made
