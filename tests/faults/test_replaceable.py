"""A replaceable worker that is killed or stopped costs its own calls, and a restart mends it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer

import psutil
import pytest

from roll.config.sections.placement import ClusterConfig
from roll.config.sections.roles import Role
from roll.core.errors import WorkerLostError
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.on_ray.resources import ResourceManager
from tests.distributed.small_workers import ROOT, Adder, Echo
from tests.faults.test_worker_death import gone_within

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def manager() -> Iterator[ResourceManager]:
    cluster = ClusterConfig(platform="cpu", devices_per_node=2, start_timeout_s=300)
    with ResourceManager(cluster, {"pair": "0-1", "one": "0"}, python_path=[ROOT]) as own:
        yield own


@pytest.fixture(scope="module")
def engines(manager: ResourceManager) -> Iterator[Cluster[Echo]]:
    place = Placement(Role.ACTOR_INFER, pool="pair", replaceable=True)
    cluster = manager.start(Echo, place)
    yield cluster
    cluster.close()


async def ask_for_long(cluster: Cluster[Echo], rank: int) -> list[object]:
    asks = [cluster.ask(rank, Echo.sleep, 600.0) for _ in range(20)]
    return list(await asyncio.gather(*asks, return_exceptions=True))


def test_a_killed_replica_ends_its_own_calls_and_nothing_else(
    manager: ResourceManager, engines: Cluster[Echo]
) -> None:
    trainer = manager.start(Adder, Placement(Role.ACTOR_TRAIN, pool="one"), 0)
    engines.on([1]).call(Echo.say_last_words)
    grandchild = engines.on([1]).call(Echo.spawn_grandchild)
    pid = engines.on([1]).call(Echo.pid)

    async def kill_in_the_middle() -> tuple[list[object], str]:
        lost = asyncio.ensure_future(ask_for_long(engines, 1))
        living = asyncio.ensure_future(engines.ask(0, Echo.wait_for_gate))
        await engines.ask(1, Echo.echo, "all are under way")
        os.kill(pid, signal.SIGKILL)
        errors = await asyncio.wait_for(lost, 15)
        assert not living.done()
        await engines.ask(0, Echo.open_gate)
        return errors, await living

    all_of_them = engines.submit(Echo.sleep, 600.0)
    training = trainer.submit(Adder.sleep, (3.0,))
    errors, living = asyncio.run(kill_in_the_middle())
    assert living == "open"
    assert {type(error) for error in errors} == {WorkerLostError}
    assert str(errors[0]).startswith(f"actor_infer[1] died (pid {pid}, node ")
    assert "the last words of this worker" in str(errors[0])
    with pytest.raises(WorkerLostError, match=r"actor_infer\[1\] died"):
        all_of_them.result(timeout_s=10)
    assert engines.lost == {1}
    with pytest.raises(WorkerLostError, match=r"actor_infer\[1\] died"):
        engines.call_each(Echo.ping)
    assert engines.on([0]).call(Echo.ping) == "actor_infer[0]"
    assert training.result() == 0
    manager.check()
    assert gone_within(10, [grandchild]) == []
    engines.restart(1)
    assert engines.lost == frozenset()
    assert engines.call_each(Echo.ping) == ["actor_infer[0]", "actor_infer[1]"]
    trainer.close()


def test_stopped_replicas_are_restarted_at_once_with_all_they_had_started(
    engines: Cluster[Echo],
) -> None:
    pids = engines.call_each(Echo.pid)
    grandchildren = engines.call_each(Echo.spawn_grandchild)

    async def stop_and_restart() -> tuple[list[object], float]:
        asks = [asyncio.ensure_future(ask_for_long(engines, rank)) for rank in (0, 1)]
        await asyncio.gather(*(engines.ask(rank, Echo.echo, "under way") for rank in (0, 1)))
        for pid in [*pids, *grandchildren]:
            os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        restarts = [asyncio.to_thread(engines.restart, rank) for rank in (0, 1)]
        back = asyncio.gather(*restarts)
        errors = [error for rank in await asyncio.gather(*asks) for error in rank]
        lost_after_s = time.monotonic() - begun
        await back
        return errors, lost_after_s

    errors, lost_after_s = asyncio.run(stop_and_restart())
    assert {type(error) for error in errors} == {WorkerLostError}
    assert lost_after_s < 5
    assert gone_within(0.5, [*pids, *grandchildren]) == []
    assert engines.call_each(Echo.ping) == ["actor_infer[0]", "actor_infer[1]"]
    assert set(engines.call_each(Echo.pid)).isdisjoint(pids)


def test_a_cluster_with_a_dead_replica_closes_in_order(manager: ResourceManager) -> None:
    place = Placement(Role.ACTOR_INFER, pool="one", replaceable=True, label="short")
    cluster = manager.start(Echo, place)
    os.kill(cluster.call(Echo.pid), signal.SIGKILL)
    cluster.close()  # whether or not the death is known by now
    with pytest.raises(WorkerLostError, match="its cluster is closed"):
        cluster.restart(0)


def tracker_of(mark: str) -> psutil.Process:
    """Python's resource tracker of the worker with this mark, once it has started."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                variables = [f"{name}={value}" for name, value in process.environ().items()]
                if mark in variables and "resource_tracker" in " ".join(process.cmdline()):
                    return process
        time.sleep(0.05)
    raise AssertionError("there is no tracker")


def test_a_replica_that_is_killed_leaves_no_shared_memory(engines: Cluster[Echo]) -> None:
    name, mark = engines.on([0]).call(Echo.share_memory)
    file = Path("/dev/shm", name)
    assert file.exists()
    tracker = tracker_of(mark)
    tracker.suspend()  # as slow as on a busy machine, where Ray was faster and killed it
    Timer(3, tracker.resume).start()
    os.kill(engines.on([0]).call(Echo.pid), signal.SIGKILL)
    engines.restart(0)
    deadline = time.monotonic() + 30
    while file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not file.exists()
    assert engines.call_each(Echo.ping) == ["actor_infer[0]", "actor_infer[1]"]
