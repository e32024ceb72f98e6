"""`ForkServer`: a process that has imported the modules that workers need; workers are its forks.

Without the server, each worker is a new Python process that imports PyTorch and transformers, which
takes five seconds of a core. On a small machine, all workers of a run then compete for a few cores.
The server is started before the driver imports these modules, so both import at the same time.

Ray starts `fork_client.py` in place of Python (`py_executable` of a runtime environment). The
server is used only for workers on this machine, without GPUs: CUDA does not work in a fork.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from roll.distributed.on_ray.environment import NO_CACHES, prepare_ray, thread_waiting
from roll.distributed.processes import fork_client

ONLY_AT_LOAD = {"OPENBLAS_NUM_THREADS": "1"}  # otherwise importing numpy starts threads


class ForkServer:
    """The driver's handle of the server process. The server ends with the driver, even if the
    driver is killed."""

    def __init__(
        self,
        modules: Sequence[str],
        engine_modules: Sequence[str] = (),
        *,
        overlapping: bool = False,
    ) -> None:
        """Start the server, without waiting for its imports.

        Args:
            modules: names of the modules to import. They must not import Ray: Ray keeps the
                environment variables of its import, but each fork gets those of its worker.
            engine_modules: modules of an engine, for workers that start one. They are imported by
                a fork of the server with a socket of its own, because engines change other
                packages when they are imported, which must not reach the trainers.
            overlapping: True if roles compute at the same time.
        """
        prepare_ray()  # marks the forks: the reaper ends them if the driver is killed
        stages = [modules, engine_modules] if engine_modules else [modules]
        self._names = [f"roll_fork_{secrets.token_hex(16)}" for _ in stages]
        # OpenMP and glibc read these variables when they are loaded, which is here.
        at_load = ONLY_AT_LOAD | NO_CACHES | thread_waiting(os.environ, overlapping=overlapping)
        env = {**os.environ, **(at_load | os.environ)}
        with ExitStack() as listeners:
            orders = []
            for name, imported in zip(self._names, stages, strict=True):
                listener = listeners.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(f"\0{name}")  # an abstract name: it leaves no file
                listener.listen(1024)  # clients wait here during the imports
                orders.append((listener.fileno(), list(imported)))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "roll.distributed.processes.fork_loop", json.dumps(orders)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # hides warnings of the imports
                env=env,
                pass_fds=[descriptor for descriptor, _ in orders],
                start_new_session=True,
            )

    @property
    def python(self) -> str:
        """Shell command that replaces the command `python`."""
        return _client(self._names[0])

    @property
    def engine_python(self) -> str | None:
        """The same for workers that start an engine; None without `engine_modules`."""
        return _client(self._names[1]) if len(self._names) > 1 else None

    def close(self) -> None:
        """End the server. Forks that still run are not ended. A second call does nothing."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def can_fork() -> bool:
    """Return whether this system offers and allows the calls that the server needs (Linux 5.3)."""
    if not (hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("probe"))
    except OSError:
        return False
    return True


def _client(name: str) -> str:
    """Return the shell command of the client that connects to the server's socket `name`."""
    return shlex.join([sys.executable, "-I", "-S", fork_client.__file__, name])
