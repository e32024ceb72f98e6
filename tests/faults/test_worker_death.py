"""A worker that dies ends every wait with its name; a driver that ends leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.config.sections.placement import ClusterConfig
from roll.config.sections.roles import Role
from roll.core.errors import WorkerError
from roll.distributed.cluster import Placement
from roll.distributed.on_ray.resources import ResourceManager
from tests.distributed.small_workers import ROOT, Adder, Echo

MARK = "ROLL_TEST_MARK"


@pytest.fixture
def manager() -> Iterator[ResourceManager]:
    cluster = ClusterConfig(platform="cpu", devices_per_node=2, start_timeout_s=300)
    with ResourceManager(cluster, {"pair": "0-1", "one": "0"}, python_path=[ROOT]) as own:
        yield own


def kill_soon(pid: int) -> threading.Timer:
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    timer.start()
    return timer


@pytest.mark.slow
def test_a_killed_rank_is_named_while_its_sibling_sleeps_and_again_by_every_later_wait(
    manager: ResourceManager,
) -> None:
    cluster = manager.start(Adder, Placement(Role.ACTOR_TRAIN, pool="pair"), 0)
    engine = manager.start(Echo, Placement(Role.ACTOR_INFER, pool="one"))
    cluster.call(Adder.say_last_words)
    grandchild = cluster.call_each(Adder.spawn_grandchild)[1]
    pid = cluster.infos[1].pid
    kill_soon(pid)
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        cluster.call(Adder.sleep, (600.0, 600.0))
    assert time.monotonic() - start < 15
    message = str(caught.value)
    assert message.startswith(f"actor_train[1] died (pid {pid}, node ")
    assert "the last words of this worker" in message

    with pytest.raises(WorkerError, match=r"actor_train\[1\] died"):
        engine.call(Echo.sleep, 60.0)
    with pytest.raises(WorkerError, match=r"actor_train\[1\] died"):
        asyncio.run(engine.ask(0, Echo.sleep, 60.0))
    with pytest.raises(WorkerError, match=r"actor_train\[1\] died"):
        manager.check()
    assert gone_within(10, [grandchild]) == []


@pytest.mark.slow
def test_a_death_that_nobody_asked_about_ends_the_asks_to_other_workers(
    manager: ResourceManager,
) -> None:
    idle = manager.start(Adder, Placement(Role.REFERENCE, pool="one"), 0)
    engine = manager.start(Echo, Placement(Role.ACTOR_INFER, pool="one"))

    async def ask_for_long() -> None:
        asks = [asyncio.ensure_future(engine.ask(0, Echo.sleep, 600.0)) for _ in range(20)]
        kill_soon(idle.infos[0].pid)
        results = await asyncio.gather(*asks, return_exceptions=True)
        assert {type(result) for result in results} == {WorkerError}
        assert "reference[0] died" in str(results[0])

    start = time.monotonic()
    asyncio.run(ask_for_long())
    assert time.monotonic() - start < 15


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_one_that_only_computes_is_waited_for(
    manager: ResourceManager,
) -> None:
    cluster = manager.start(Adder, Placement(Role.ACTOR_TRAIN, pool="pair"), 0)
    assert cluster.call_each(Adder.hold_the_lock, 20.0) == [0, 1]
    pid = cluster.infos[1].pid
    start = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"actor_train\[1\] \(pid {pid}, .* is stopped"):
        cluster.call(Adder.sleep, (600.0, 600.0))
    assert time.monotonic() - start < 25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "signum", "to_group", "code"),
    [
        ("end", None, False, 0),
        ("raise", None, False, 1),
        ("sleep", signal.SIGINT, True, 128 + signal.SIGINT),
        ("sleep", signal.SIGTERM, False, 128 + signal.SIGTERM),
        ("sleep", signal.SIGTERM, True, 128 + signal.SIGTERM),
        ("sleep", signal.SIGKILL, False, -signal.SIGKILL),
    ],
    ids=["end", "raise", "Ctrl-C", "SIGTERM", "SIGTERM to Ray as well", "SIGKILL"],
)
def test_no_process_is_left_after_the_driver_ends(
    mode: str, signum: signal.Signals | None, to_group: bool, code: int
) -> None:
    mark = f"{MARK}={uuid.uuid4().hex}"
    environ = dict(os.environ) | dict([mark.split("=")])
    # A session of its own, so that a signal can go to the whole group as a terminal or a batch
    # system sends it.
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.driver", mode],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert driver.stdout is not None
        ready = driver.stdout.readline()
        assert ready.startswith("ready "), driver.communicate(timeout=45)
        assert signum is None or marked(mark), "the mark must be visible while the run lives"
        if signum is not None:
            (os.killpg if to_group else os.kill)(driver.pid, signum)
        # Ray, where it has died as well, would be waited for for a minute.
        _, errors = driver.communicate(timeout=45)
        assert driver.returncode == code, errors
        left = wait_until_unmarked(mark, 15)
        assert left == [], left
    finally:
        for pid, _ in marked(mark):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[tuple[int, str]]:
    """Processes that carry the mark in their environment, other than this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append((int(entry.name), (entry / "cmdline").read_text()))
        except OSError:
            continue
    return found


def wait_until_unmarked(mark: str, limit_s: float) -> list[tuple[int, str]]:
    deadline = time.monotonic() + limit_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def gone_within(limit_s: float, pids: list[int]) -> list[int]:
    """Those of `pids` that still live when the time is over."""
    deadline = time.monotonic() + limit_s
    while True:
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
