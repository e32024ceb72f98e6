"""Patches on a real Ray: in the object store whatever their size, and gone with their addresses."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import ray

from benchmarks.driver_meter import store_reader
from roll.config.sections.data import PicturesConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.pictures import Pictures
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import WorkerSpec
from roll.data.pictures.forms import picture_of
from roll.data.pictures.picture import EncodedPictures
from roll.distributed.cluster import Placement
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.remote_values import RemoteValue
from roll.distributed.worker import Worker
from roll.models.image_processor import load_image_processor
from roll.runtime.pictures.maker import PictureMaker, start_pictures
from tests.pictures import coloured, file_of
from tests.vision_models import save_vision_model


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread("test") as own:
        yield own


class Reader(Worker):
    """Reads the patches of a row as a trainer does."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)

    def sums(self, rows: Sequence[Pictures]) -> list[int]:
        return [int(np.asarray(own.patches.get(), dtype=np.int64).sum()) for own in rows]

    def pid(self) -> int:
        return os.getpid()


def _model(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(save_vision_model(folder, "qwen2_vl")))


def _row(model: ModelConfig, height: int, width: int, seed: int) -> tuple[Pictures, int]:
    """Pictures of a row, and the sum of their patches."""
    processor = load_image_processor(model, PicturesConfig())
    image = coloured(height, width, seed=seed)
    encoded_one = picture_of(file_of(image), f"row {seed}", Path())
    known = Pictures((0,), (processor.grid(height, width),), EncodedPictures((encoded_one,)))
    return known, int(processor.patches(image).astype(np.int64).sum())


def _maker(model: ModelConfig, rows: Sequence[Pictures], manager: ResourceManager) -> PictureMaker:
    maker = start_pictures(rows, PicturesConfig(workers=2), model, manager)
    assert maker is not None
    return maker


def test_patches_stay_in_the_store_and_outlive_their_worker(
    manager: ResourceManager, loop: LoopThread, tmp_path: Path
) -> None:
    model = _model(tmp_path / "model")
    rows, sums = zip(*(_row(model, *size) for size in [(28, 28, 1), (200, 220, 2)]), strict=True)
    maker = _maker(model, rows, manager)
    reader = manager.start(Reader, Placement(Role.REWARD, pool="one", workers=1))
    look = store_reader()
    before, _ = look()

    def made(own: Pictures) -> Pictures:
        return loop.run(maker.made("row", own))

    small = made(rows[0])  # of 5 KB, which Ray would send to the driver
    assert isinstance(small.patches, RemoteValue)
    _wait_until(lambda: look()[0] - before > 5_000, "the patches of a small picture are elsewhere")
    found = [small, made(rows[1])]
    for rank in range(maker.cluster.world_size):
        os.kill(maker.cluster.infos[rank].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert reader.call(Reader.sums, found) == list(sums)
    again = [made(own) for own in rows]  # by new workers
    assert reader.call(Reader.sums, again) == list(sums)

    del found, again, small
    gc.collect()
    _wait_until(lambda: look()[0] <= before, "patches are left in the store")


def _wait_until(done: Callable[[], bool], wrong: str) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, wrong
        time.sleep(0.2)


def test_workers_of_pictures_run_on_the_machine_of_the_driver(manager: ResourceManager) -> None:
    place = Placement(Role.PICTURES, pool=None, workers=1, replaceable=True)
    cluster = manager.start(Reader, place)
    here = ray.get_runtime_context().get_node_id()
    assert [info.node for info in cluster.infos] == [here]
    cluster.restart(0)
    assert [info.node for info in cluster.infos] == [here]
