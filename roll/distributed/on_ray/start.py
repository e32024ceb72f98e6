"""How a run comes to a Ray: it starts one of its own, or joins one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray._private import parameter, services

from roll.distributed.on_ray.members import Daemon
from roll.platform.processes import look_at

LOGGER = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
SHUTDOWN_TIMEOUT_S = 20.0
"""For Ray to end by itself; a process of it that is stopped would keep it for ever."""


def start(*, num_cpus: int, num_gpus: int) -> None:
    """A Ray on this machine that ends with this process, without what no run asks, and that no
    other machine can reach. To be called with a token of its own (`ray_token.own_token`)."""
    with _small_and_local():
        _init(address="local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False)


def join(address: str | None) -> None:
    """
    Raises:
        ConnectionError: no Ray answers there.
    """
    _init(address=address)


def daemons() -> list[Daemon]:
    """The processes of the Ray that `start` started, without which nothing works."""
    node = ray._private.worker._global_node
    processes = {} if node is None else node.all_processes
    known = {"raylet": "Ray's raylet", "gcs_server": "Ray's control store"}
    return [
        Daemon(name, info.process.pid)
        for kind, name in known.items()
        for info in processes.get(kind, [])
    ]


def end() -> None:
    """End the Ray that `start` started. Where one of its processes is gone or stopped, it waits for
    an answer of none of them."""
    started = daemons()
    looks = [look_at(daemon.pid) for daemon in started]
    if any(look is None or look.stopped for look in looks):
        kill(started)
    shut_down(started, SHUTDOWN_TIMEOUT_S)


def shut_down(started: list[Daemon], timeout_s: float) -> None:
    """Have Ray end by itself, and kill its processes where that takes longer than `timeout_s`."""
    late = threading.Timer(timeout_s, _kill_late, [started, timeout_s])
    late.daemon = True
    late.start()
    try:
        ray.shutdown()
    finally:
        late.cancel()


def kill(started: list[Daemon]) -> None:
    """Kill those processes of Ray that are still there."""
    for daemon in started:
        if look_at(daemon.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(daemon.pid, signal.SIGKILL)


def _kill_late(started: list[Daemon], timeout_s: float) -> None:
    LOGGER.warning("Ray did not end in %g s; its processes are killed", timeout_s)
    kill(started)


def _init(**options: Any) -> None:
    main = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGTERM)
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
    if main:
        # Ray puts its own handler in place, which exits at once, past all cleanups.
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _small_and_local() -> Iterator[None]:
    """Listen on the loopback interface, and leave out Ray's log monitor, autoscaler and state
    service.

    `ray.init` turns a loopback address into another one of the machine's, and Ray's processes then
    listen on all interfaces. Those left out take 0.14 GB, and wake up on the cores that compute;
    `ray start` has switches for the first two, `ray.init` for none. Whoever wants `ray status` or
    `ray list actors` starts a Ray with them and lets runs join it.
    """
    params, start_api_server = parameter.RayParams, services.start_api_server
    ours = {"node_ip_address": LOOPBACK, "include_log_monitor": False, "no_monitor": True}
    parameter.RayParams = lambda **given: params(**given | ours)
    # What it returns itself where the service does not come up, which Ray can do without.
    services.start_api_server = lambda *args, **kwargs: (None, None)
    try:
        yield
    finally:
        parameter.RayParams, services.start_api_server = params, start_api_server
