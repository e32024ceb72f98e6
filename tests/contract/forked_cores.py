"""Lets engines of tests start vLLM's core as a fork, as the workers of a run do.

A new interpreter would import vLLM again for each engine, which takes ten seconds of a core.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any

from roll.distributed.on_ray.environment import environment, thread_waiting
from roll.distributed.processes.child_forks import ChildServer, give_child_server
from roll.distributed.processes.fork_server import ONLY_AT_LOAD


def fork_next_core() -> None:
    """Let the next engine of this process fork its core from a server that has imported vLLM."""
    if sys.version_info < (3, 14):  # as `start_child_server`
        give_child_server(_server())


@cache
def _server() -> ChildServer:
    """Start a server, with the variables of a run's fork server; it ends with this process."""
    server: Any = ForkServer()
    server.set_forkserver_preload(["tests.contract.preloaded_core"])
    with environment({**ONLY_AT_LOAD, **thread_waiting(os.environ, overlapping=True)}):
        server.ensure_running()
    address = Path(server._forkserver_address)
    return ChildServer(server._forkserver_pid, address, server._forkserver_alive_fd, lasts=True)
