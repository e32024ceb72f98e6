"""Checkpoints that are written beside the steps: whole or absent, one at a time, and never quietly
lost. The strategy is scripted: its files are written when the test lets them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.config.sections.lifecycle import CheckpointConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.errors import CheckpointError, WaitTimeoutError
from roll.core.types import RankInfo, WorkerSpec
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.local import LocalLauncher
from roll.output_dir.checkpoints import Checkpoints, RunState
from roll.pipeline.outputs.saves import Saves
from roll.strategy.interfaces import Saving
from roll.workers.model import TrainWorker
from roll.workers.work import WorkMeter


class Scripted:
    """Each rank writes a file; `held` of rank 1 waits, and then fails if there is an error."""

    def __init__(self, rank: int) -> None:
        self.rank_info = RankInfo(rank, rank, 2, is_dp_leader=True)
        self.rank = rank
        self.go = threading.Event()
        self.error: Exception | None = None

    def begin_save(self, path: Path, *, copied: bool, optimizer: bool) -> Saving:
        assert copied
        path.mkdir(parents=True, exist_ok=True)

        def write() -> None:
            if self.rank:
                assert self.go.wait(30)
                if self.error is not None:
                    raise self.error
            (path / f"rank{self.rank}").write_text("x")

        def complete() -> None:
            assert (path / "rank1").exists()
            (path / "meta.json").write_text("{}")

        return Saving(write, complete)

    def save(self, path: Path, *, optimizer: bool) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "meta.json").write_text("{}")

    def close(self) -> None:
        """Nothing to leave."""


def worker(spec: WorkerSpec, scripts: list[Scripted]) -> TrainWorker[Any]:
    scripts.append(Scripted(spec.rank))
    strategy: Any = scripts[-1]
    return TrainWorker(spec, strategy, WorkMeter(ModelConfig(path="none"), trains=True))


@pytest.fixture
def scripts() -> list[Scripted]:
    return []


@pytest.fixture
def cluster(scripts: list[Scripted]) -> Iterator[Cluster[Any]]:
    with LocalLauncher(world_size=2) as launcher:
        yield launcher.start(worker, Placement(Role.ACTOR_TRAIN, pool="p"), scripts)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("a: 1\n")
    return path


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    return saves_of(tmp_path, limit_s=60)


def saves_of(folder: Path, limit_s: float) -> Saves:
    return Saves(Checkpoints(folder / "all", CheckpointConfig(asynchronous=True)), limit_s)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def save(
    saves: Saves, cluster: Cluster[Any], config: Path, step: int, *, at_once: bool = False
) -> None:
    saves.save(
        RunState(step=step, sampler={}),
        lambda folder: saves.save_role(cluster, folder / "actor_train"),
        config,
        at_once=at_once,
    )


def test_a_checkpoint_appears_when_the_last_rank_has_written(
    saves: Saves, cluster: Cluster[Any], scripts: list[Scripted], config: Path, tmp_path: Path
) -> None:
    save(saves, cluster, config, 1)
    saves.check()
    assert names(tmp_path / "all") == {".writing_step_000001"}
    scripts[1].go.set()
    save(saves, cluster, config, 2, at_once=True)  # waits for the first
    assert names(tmp_path / "all") == {"step_000001", "step_000002"}
    whole = {"state.json", "config.yaml", "actor_train"}
    assert names(tmp_path / "all/step_000001") == whole
    assert names(tmp_path / "all/step_000001/actor_train") == {"rank0", "rank1", "meta.json"}


def test_a_write_that_fails_is_named_and_leaves_nothing(
    saves: Saves, cluster: Cluster[Any], scripts: list[Scripted], config: Path, tmp_path: Path
) -> None:
    scripts[1].error = CheckpointError("actor_train/rank1 could not be written: no space")
    save(saves, cluster, config, 1)
    scripts[1].go.set()
    with pytest.raises(CheckpointError, match="rank1 could not be written: no space"), saves:
        pass
    assert not names(tmp_path / "all")


def test_a_write_that_stops_growing_is_given_up(
    cluster: Cluster[Any], scripts: list[Scripted], config: Path, tmp_path: Path
) -> None:
    saves = saves_of(tmp_path, limit_s=0.5)
    save(saves, cluster, config, 1)
    with pytest.raises(WaitTimeoutError, match=r"\.writing_step_000001 .* 0\.5 s"):
        save(saves, cluster, config, 2)
    scripts[1].go.set()


def test_an_error_of_a_step_comes_first_and_the_write_still_ends(
    saves: Saves, cluster: Cluster[Any], scripts: list[Scripted], config: Path, tmp_path: Path
) -> None:
    def failing_step() -> None:
        with saves:
            save(saves, cluster, config, 1)
            scripts[1].go.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert names(tmp_path / "all") == {"step_000001"}


def test_an_interrupt_waits_for_the_write_and_a_second_one_gives_it_up(
    saves: Saves, cluster: Cluster[Any], scripts: list[Scripted], config: Path, tmp_path: Path
) -> None:
    def interrupted(step: int) -> None:
        with saves:
            save(saves, cluster, config, step)
            raise KeyboardInterrupt("first")

    threading.Timer(0.2, scripts[1].go.set).start()
    with pytest.raises(KeyboardInterrupt, match="first"):
        interrupted(1)
    assert names(tmp_path / "all") == {"step_000001"}
    scripts[1].go.clear()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt) as second:
        interrupted(2)
    assert not second.value.args
    assert names(tmp_path / "all") == {"step_000001", ".writing_step_000002"}
    scripts[1].go.set()
