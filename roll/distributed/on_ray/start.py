"""Start of Ray on this machine, connection to a Ray cluster, and end of both."""

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

from roll.core.errors import WaitTimeoutError
from roll.distributed.on_ray.members import Daemon
from roll.platform.processes import process_state

LOGGER = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
SHUTDOWN_TIMEOUT_S = 20.0
"""Time limit for Ray to end by itself, in seconds. A stopped process of Ray would block the end for
ever."""


def start(*, num_cpus: int, num_gpus: int) -> None:
    """Start Ray on this machine, without services that no run needs. Other machines cannot reach
    it, and it ends with this process. Call this function inside `token.own_token`.

    Raises:
        WaitTimeoutError: Ray's node was not there within Ray's own limit of 30 s.
    """
    with _small_and_local():
        try:
            _init(address="local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False)
        except Exception as error:
            if "timed out during startup" not in str(error):  # Ray raises a bare Exception
                raise
            raise WaitTimeoutError(
                "waited 30 s for Ray to start on this machine, a limit that Ray sets: the machine "
                "is too busy, or its memory is used up; give the same command again "
                f"(Ray says: {error})"
            ) from None
    _shut_out_others()


def _shut_out_others() -> None:
    """Let no other user into the folder of this Ray, which has its sockets, the logs of workers and
    objects that do not fit into memory. Ray makes it for the users of a machine to share, so that
    all may read and remove what is there."""
    os.chmod(ray._private.worker._global_node.get_session_dir_path(), 0o700)


def join(address: str | None) -> None:
    """Connect this process to the Ray cluster at `address`.

    Args:
        address: address of the cluster, as for `ray.init`.

    Raises:
        ConnectionError: no Ray answers at the address.
        ray.exceptions.AuthenticationError: the cluster does not accept the token.
    """
    _init(address=address)


def daemons() -> list[Daemon]:
    """Return the processes of the Ray that `start` started, as far as no run works without them:
    the raylet and the control store. Return an empty list if there are none."""
    node = ray._private.worker._global_node
    processes = {} if node is None else node.all_processes
    known = {"raylet": "Ray's raylet", "gcs_server": "Ray's control store"}
    return [
        Daemon(name, info.process.pid)
        for kind, name in known.items()
        for info in processes.get(kind, [])
    ]


def end() -> None:
    """End the Ray that `start` started. If one of its processes has ended or is stopped, kill all
    of them first, because waiting for their answers could take for ever."""
    started = daemons()
    looks = [process_state(daemon.pid) for daemon in started]
    if any(look is None or look.stopped for look in looks):
        kill(started)
    shut_down(started, SHUTDOWN_TIMEOUT_S)


def shut_down(started: list[Daemon], timeout_s: float) -> None:
    """Let Ray end by itself. Kill its processes if that takes longer than `timeout_s`."""
    late = threading.Timer(timeout_s, _kill_late, [started, timeout_s])
    late.daemon = True
    late.start()
    try:
        ray.shutdown()
    finally:
        late.cancel()


def kill(started: list[Daemon]) -> None:
    """Kill those of the given processes of Ray that still exist."""
    for daemon in started:
        if process_state(daemon.pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(daemon.pid, signal.SIGKILL)


def _kill_late(started: list[Daemon], timeout_s: float) -> None:
    LOGGER.warning("Ray did not end in %g s; its processes are killed", timeout_s)
    kill(started)


def _init(**options: Any) -> None:
    """Call `ray.init` without its messages; keep this process's handler of SIGTERM."""
    main = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGTERM)
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
    if main:
        # Ray installs its own handler, which exits at once and skips all cleanups.
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _small_and_local() -> Iterator[None]:
    """Make a `ray.init` inside the block listen only on the loopback interface, and start neither
    log monitor nor autoscaler nor state service.

    `ray.init` replaces a loopback address by another address of the machine, and Ray's processes
    then listen on all interfaces. The services that are left out take 0.14 GB and use the cores
    that compute. `ray start` has switches for the first two services, `ray.init` has none, so this
    function replaces internal functions of Ray. Users who want `ray status` or `ray list actors`
    start Ray themselves and let runs join it.
    """
    params, start_api_server = parameter.RayParams, services.start_api_server
    ours = {"node_ip_address": LOOPBACK, "include_log_monitor": False, "no_monitor": True}
    parameter.RayParams = lambda **given: params(**given | ours)
    # The result that the original gives if the service fails to start; Ray works without it.
    services.start_api_server = lambda *args, **kwargs: (None, None)
    try:
        yield
    finally:
        parameter.RayParams, services.start_api_server = params, start_api_server
