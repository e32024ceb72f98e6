"""Samples are written behind the run, which neither waits for the disk nor ends with the writer."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.errors import WorkerLostError
from roll.core.types import WorkerSpec
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.local import LocalLauncher
from roll.output_dir.sample_files import Origin
from roll.runtime.sample_keeper import MAX_WAITING, SampleKeeper
from roll.workers.sample_writer.worker import SampleJob, SampleWriter
from tests.fakes import group

ORIGIN = Origin("hash", "qwen3", pictures=False)

Does = Callable[[SampleJob], str | None]


class Scripted(SampleWriter):
    """Writes nothing; `does` says what becomes of each job."""

    def __init__(self, spec: WorkerSpec, does: Does) -> None:
        super().__init__(spec, Path("nowhere"), ModelConfig(path="nowhere"), ORIGIN)
        self._does = does

    def write_file(self, job: SampleJob) -> str | None:
        return self._does(job)


@pytest.fixture
def make() -> Iterator[Callable[..., SampleKeeper]]:
    with LocalLauncher(call_timeout_s=20) as launcher:

        def keeper(does: Does, *, training: bool = True) -> SampleKeeper:
            place = Placement(Role.SAMPLES, pool=None, workers=1, replaceable=True)
            cluster: Cluster[Any] = launcher.start(Scripted, place, does)
            return SampleKeeper(cluster, training=training, write_timeout_s=20)

        yield keeper


def test_the_step_does_not_wait_and_the_checkpoint_does(make: Any) -> None:
    go, jobs = threading.Event(), list[int]()

    def slow(job: SampleJob) -> None:
        assert go.wait(20)
        jobs.append(job.step)

    keeper = make(slow)
    keeper.keep_step(0, [group("a", [1.0, 0.0])])
    keeper.keep_step(1, [group("a", [1.0, 0.0])])
    assert jobs == []
    threading.Timer(0.2, go.set).start()
    keeper.settle(20)
    assert jobs == [0, 1]
    assert keeper.take_metrics().values_by_name() == {}
    keeper.close()


def test_a_disk_that_hangs_costs_samples_which_are_counted_and_one_wait(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    keeper = make(lambda job: None if go.wait(20) else "never")
    for step in range(MAX_WAITING + 2):
        keeper.keep_step(step, [group("a", [1.0, 0.0])])
    assert keeper.take_metrics().values_by_name() == {"samples/not_kept": 4}
    assert keeper.take_metrics().values_by_name() == {}
    keeper.settle(0.05)
    keeper.settle(3600)  # it knows that the disk hangs
    told = [one.message for one in caplog.records]
    assert len(told) == 2
    assert f"samples of step {MAX_WAITING} are not kept (4 earlier files" in told[0]
    assert "4 files of samples are not written after 0.05 s" in told[1]
    go.set()
    keeper.keep_validation(9, {"held_out": []})  # something is done, so it waits again
    while keeper._hangs:
        threading.Event().wait(0.01)
    keeper.settle(20)
    keeper.close()


def test_a_full_disk_is_told_once_and_every_lost_sample_counted(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = make(lambda job: "No space left on device" if job.step < 2 else None)
    for step in range(4):
        keeper.keep_step(step, [group("a", [1.0, 0.0, 1.0])])
    keeper.settle(20)
    [told] = [one.message for one in caplog.records]
    assert "the 3 samples of step 0 are not kept (No space left on device)" in told
    assert keeper.take_metrics().values_by_name() == {"samples/not_kept": 6}
    keeper.close()


@pytest.mark.parametrize(("deaths", "lost"), [(1, 0), (2, 2)])
def test_a_writer_that_dies_is_replaced_and_tries_once_more(
    make: Any, deaths: int, lost: int
) -> None:
    tries: list[int] = []

    def dies(job: SampleJob) -> None:
        tries.append(job.step)
        if len(tries) <= deaths:
            raise WorkerLostError("samples[0] died", Role.SAMPLES, "", 0)

    keeper = make(dies)
    keeper.keep_step(0, [group("a", [1.0, 0.0])])
    keeper.keep_step(1, [group("a", [1.0, 0.0])])
    keeper.settle(20)
    assert tries == [0, 0, 1]
    assert keeper.take_metrics().values_by_name().get("samples/not_kept", 0) == lost
    keeper.close()


def test_steps_are_left_out_if_only_validations_are_kept(make: Any) -> None:
    jobs: list[tuple[int, list[str | None]]] = []
    keeper = make(lambda job: jobs.append((job.step, list(job.sets))), training=False)
    keeper.keep_step(0, [group("a", [1.0])])
    keeper.keep_validation(1, {"one": [group("a", [1.0, 0.0])], "two": [group("b", [1.0])]})
    keeper.settle(20)
    assert jobs == [(1, ["one", "one", "two"])]
    keeper.close()


def test_no_thread_holds_samples_that_are_written(make: Any) -> None:
    """Their tokens would stay in the object store."""
    seen: list[weakref.ref[Any]] = []
    keeper = make(lambda job: seen.append(weakref.ref(job.samples[0].sample.completion.tokens)))
    groups = [group("a", [1.0])]
    keeper.keep_step(0, groups)
    del groups
    keeper.settle(20)
    gc.collect()
    assert [one() for one in seen] == [None]
    keeper.close()
