"""Use of machines and GPUs, and what a step's record says of it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from roll.config.sections.roles import Role
from roll.core.metrics import Max, Mean
from roll.core.types import WorkerSpec
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.dispatch import JOIN, dispatch
from roll.distributed.local import LocalLauncher
from roll.distributed.worker import Worker
from roll.pipeline.usage.machines import UTILISATION, Machines, summed
from roll.pipeline.usage.speed import TERA, Speed
from roll.platform.machine import GIB
from roll.platform.usage import (
    MB,
    GpuUse,
    MachineUse,
    WorkerUse,
    group_memory,
    rates,
    use_of_gpu,
    use_of_machine,
)
from roll.workers.work import Work

BEGIN = MachineUse(
    machine="a",
    at_s=10.0,
    busy_s=100.0,
    cores=4,
    memory_used=3 * GIB,
    memory_total=16 * GIB,
    group_used=None,
    group_limit=None,
    received=50 * MB,
    sent=0,
    read=None,
    written=7 * MB,
)
GPU = GpuUse("a", 0, "NVIDIA H200", 0.5, 30 * GIB, 140 * GIB, 10 * GIB, 12 * GIB, 20 * GIB)


class Unanswered:
    """The answer of workers that hang, and the cluster that they are of."""

    role = Role.ENVIRONMENT
    lost: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.waits = threading.Event()

    def beside(self, method: object) -> Unanswered:
        return self

    def poll(self, timeout_s: float) -> bool:
        self.waits.set()
        time.sleep(timeout_s)
        return False


class Scripted(Worker):
    """Says what it uses and has done from lists: the next item at each question."""

    def __init__(self, spec: WorkerSpec, uses: list[WorkerUse], work: list[Work]) -> None:
        super().__init__(spec)
        self.uses, self.work = uses, work

    @dispatch(JOIN)
    def usage(self) -> list[WorkerUse]:
        return [self.uses.pop(0) if len(self.uses) > 1 else self.uses[0]]

    @dispatch(JOIN)
    def take_work(self) -> list[Work]:
        return self.work


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    with LocalLauncher(world_size=2) as launcher:
        yield launcher


def started(
    launcher: LocalLauncher, uses: list[WorkerUse], work: list[Work]
) -> Mapping[str, Cluster[Any]]:
    place = Placement(Role.ACTOR_TRAIN, pool="p")
    return {"actor_train": launcher.start(Scripted, place, uses, work)}


def test_rates_are_differences_over_the_time_between() -> None:
    end = replace(BEGIN, at_s=12.0, busy_s=104.0, received=70 * MB, sent=5 * MB, written=3 * MB)
    assert rates(BEGIN, end) == {
        "cpu_share": 0.5,
        "network_in_mb_per_s": 10.0,
        "network_out_mb_per_s": 2.5,
        "disk_write_mb_per_s": 0.0,  # a disk that is another one
    }


def test_this_machine_is_seen_as_psutil_sees_it() -> None:
    before, own = use_of_machine(), psutil.virtual_memory()
    assert before.memory_total == own.total
    assert before.memory_used == pytest.approx(own.total - own.available, abs=GIB)
    begun_s = time.perf_counter()
    while time.perf_counter() - begun_s < 0.3:
        pass
    found = rates(before, use_of_machine())
    assert 0.5 / before.cores < found["cpu_share"] <= 1


def test_a_container_is_told_with_its_limit_and_without_its_cache(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/run/job\n")
    job = tmp_path / "groups/run/job"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    assert group_memory(tmp_path / "own", tmp_path / "groups") == (None, None)
    above = job.parent
    (above / "memory.max").write_text("5000\n")
    (above / "memory.current").write_text("4000\n")
    (above / "memory.stat").write_text("anon 2500\ninactive_file 1500\n")
    assert group_memory(tmp_path / "own", tmp_path / "groups") == (2500, 5000)
    (tmp_path / "own").write_text("4:memory:/job\n")
    first = tmp_path / "groups/memory/job"
    first.mkdir(parents=True)
    for name, text in (
        ("memory.limit_in_bytes", "900"),
        ("memory.usage_in_bytes", "800"),
        ("memory.stat", "inactive_file 1\ntotal_inactive_file 300"),
    ):
        (first / name).write_text(text)
    assert group_memory(tmp_path / "own", tmp_path / "groups") == (500, 900)


class Cuda:
    """The part of `torch.cuda` that is asked, of a process that computes, with NVML or without."""

    def __init__(self, *, begun: bool, nvml: bool) -> None:
        self.begun, self.nvml = begun, nvml
        self.largest = 20 * GIB

    def is_initialized(self) -> bool:
        return self.begun

    def get_device_properties(self, place: int) -> Any:
        assert self.begun, "this would start CUDA"
        return SimpleNamespace(total_memory=140 * GIB, name="NVIDIA H200")

    def memory_allocated(self, place: int) -> int:
        return 10 * GIB

    def memory_reserved(self, place: int) -> int:
        return 12 * GIB

    def max_memory_allocated(self, place: int) -> int:
        return self.largest

    def reset_peak_memory_stats(self, place: int) -> None:
        self.largest = 10 * GIB

    def utilization(self, place: int) -> int:
        if not self.nvml:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return 50

    def device_memory_used(self, place: int) -> int:
        if not self.nvml:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return 30 * GIB


def test_a_gpu_is_told_as_far_as_the_process_knows_it() -> None:
    cuda = Cuda(begun=True, nvml=True)
    name = use_of_machine().machine
    assert use_of_gpu(cuda, 0, 0) == replace(GPU, machine=name)
    assert use_of_gpu(cuda, 0, 0).largest == 10 * GIB, "of the time since the last question"
    nothing: dict[str, Any] = dict.fromkeys(("utilisation", "used"))
    found = use_of_gpu(Cuda(begun=True, nvml=False), 0, 0)
    assert found == replace(GPU, machine=name, **nothing)
    idle = use_of_gpu(Cuda(begun=False, nvml=True), 0, 3)
    own: dict[str, Any] = dict.fromkeys(("name", "total", "allocated", "reserved", "largest"))
    assert idle == replace(GPU, machine=name, number=3, **own)


def test_of_several_machines_the_largest_and_the_smallest_are_told() -> None:
    found = summed(
        {
            ("machine/cpu_share", "a"): Max(0.25),
            ("machine/cpu_share", "b"): Max(0.75),
            (UTILISATION, "a 0"): Mean(0.2 + 0.4, 2),
            (UTILISATION, "a 1"): Mean(0.9),
            ("memory/driver_gb", ""): Max(2.0),
        }
    )
    assert found.values_by_name() == pytest.approx(
        {
            "machine/cpu_share": 0.75,
            "machine/cpu_share_min": 0.25,
            "gpu/utilisation": 0.6,
            "gpu/utilisation_min": 0.3,
            "memory/driver_gb": 2.0,
        }
    )


def test_a_step_has_the_largest_of_its_looks(launcher: LocalLauncher, tmp_path: Path) -> None:
    later = replace(BEGIN, at_s=12.0, busy_s=108.0, received=60 * MB, memory_used=4 * GIB)
    busy = replace(GPU, utilisation=1.0, used=40 * GIB)
    uses = [
        WorkerUse(2 * GIB, BEGIN, [GPU]),
        WorkerUse(1 * GIB, BEGIN, [replace(GPU, largest=None)]),
        WorkerUse(3 * GIB, later, [busy]),
        WorkerUse(1 * GIB, later, []),
        WorkerUse(1 * GIB, later, [busy]),
    ]
    clusters = started(launcher, uses, [])
    machines = Machines(lambda: clusters, tmp_path)
    machines.look()
    machines.look()
    found = machines.take().values_by_name()
    here = use_of_machine()
    assert found["memory/rss_gb_max"] == found["memory/actor_train/gb_max"] == 3
    assert found["memory/actor_train/gb_sum"] == 4
    assert found["memory/driver_gb"] == pytest.approx(
        psutil.Process(os.getpid()).memory_info().rss / GIB, abs=0.3
    )
    assert found["machine/memory_total_gb_min"] == 16
    assert found["machine/memory_total_gb"] == pytest.approx(max(16, here.memory_total / GIB))
    assert found["machine/cpu_share"] == 1
    assert found["gpu/actor_train/allocated_gb"] == 10
    assert found["gpu/actor_train/largest_gb"] == 20
    assert found["gpu/memory_used_gb"] == 40
    assert found["gpu/utilisation"] == 0.75
    assert "gpu/utilisation_min" not in found, "both workers share the GPU"
    assert found["machine/disk_free_gb"] > 0
    assert machines.take().values_by_name() == found, "no look since: as it was"
    machines.look()
    assert machines.take()["memory/rss_gb_max"].value() == 1


def test_a_watch_looks_by_itself_and_a_step_does_not_wait(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    own = launcher.start(Worker, Placement(Role.REWARD, pool="p"))
    machines = Machines(lambda: {"rewards.a": own}, tmp_path)
    with machines:
        first = machines.take()
        assert first["memory/rewards.a/gb_sum"].value() > 0
        waited_s = []
        for _ in range(20):
            begun_s = time.perf_counter()
            machines.take()
            waited_s.append(time.perf_counter() - begun_s)
        assert sorted(waited_s)[10] < 0.005
        deadline = time.monotonic() + 20
        while "machine/cpu_share" not in machines.take() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "machine/cpu_share" in machines.take()
    assert not any(t.name == "roll-machines" for t in threading.enumerate())


def test_a_worker_that_hangs_holds_up_no_step_and_no_end(tmp_path: Path) -> None:
    hangs: Any = Unanswered()
    machines = Machines(lambda: {"environments.a": hangs}, tmp_path)
    with machines:
        assert hangs.waits.wait(20)
        begun_s = time.perf_counter()
    assert time.perf_counter() - begun_s < 5
    found = machines.take().values_by_name()
    assert found["machine/memory_total_gb"] > 0
    assert "memory/environments.a/gb_max" not in found


def work(flops: int | None, seconds: float, device: str | None = "NVIDIA H200") -> Work:
    return Work("train", flops, seconds, "bfloat16", device)


def test_the_share_of_the_peak_is_of_all_devices_for_the_time_of_the_slowest(
    launcher: LocalLauncher,
) -> None:
    # Two ranks say the same: two times 400 in 2 s on two devices.
    clusters = started(launcher, [], [work(400 * TERA, 2.0)])
    found = Speed(lambda: clusters, None).take().values_by_name()
    assert found == pytest.approx(
        {
            "perf/actor_train/train_tflops": 200.0,
            "perf/actor_train/train_mfu": 200 / 989.4,
        }
    )
    found = Speed(lambda: clusters, 400.0).take().values_by_name()
    assert found["perf/actor_train/train_mfu"] == 0.5


def test_without_a_known_peak_or_model_no_share_is_made_up(
    launcher: LocalLauncher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clusters = started(launcher, [], [work(10 * TERA, 1.0, "NVIDIA X1")])
    speed = Speed(lambda: clusters, None)
    for _ in range(2):
        assert speed.take().values_by_name() == {"perf/actor_train/train_tflops": 10.0}
    assert caplog.text.count("cluster.peak_tflops") == 1
    with LocalLauncher(world_size=2) as other:
        unknown = started(other, [], [work(None, 1.0)])
        speed = Speed(lambda: unknown, None)
        assert [speed.take().values_by_name() for _ in range(2)] == [{}, {}]
    assert caplog.text.count("the operations of its model are not known") == 1
