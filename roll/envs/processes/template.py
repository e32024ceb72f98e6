"""`Template`: the parent's handle of the process whose forks play the episodes."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll.core.errors import ConfigError, EnvironmentFailedError
from roll.envs.processes import child_main

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Time in which the interpreter must start and import the environment, in seconds."""
END_TIMEOUT_S = 5.0
"""Time in which a template must end when its parent hangs up, in seconds."""
ONE_THREAD = {
    f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "RAYON")
} | {"TOKENIZERS_PARALLELISM": "false"}
"""Variables that keep libraries from starting threads, which a fork would not have."""
FOREIGN = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONEXECUTABLE"})
"""Variables that would lead another interpreter to the packages of this one."""


@dataclass(frozen=True, slots=True)
class Started:
    """Process of one episode."""

    number: int
    link: socket.socket
    """Connection to it."""
    ended: Future[str]
    """How it ended, such as `signal SIGKILL`."""


class Template:
    """A running template. `start`, `fork` and `kill` may be called from any thread."""

    def __init__(self, where: str, python: str, spec: Mapping[str, Any]) -> None:
        """Prepare the template.

        Args:
            where: key of the environment in the config, for messages.
            python: path of the interpreter.
            spec: what it loads, see `child_main.load`.
        """
        self._where = where
        self._python = python
        self._spec = spec
        self._ready: Future[None] = Future()
        self._lock = threading.Lock()
        self._ends: dict[int, Future[str]] = {}
        self._next = 0
        self._lost = False
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The kernel kills the template when the thread that started it ends, so one thread has to
        # start it and to listen until its end.
        self._thread = threading.Thread(target=self._listen, name="env-template", daemon=True)

    @property
    def lost(self) -> bool:
        """True if the process has ended."""
        return self._lost

    def start(self) -> None:
        """Start the process and wait until it has imported the environment.

        Raises:
            ConfigError: the interpreter does not start, or the import fails; the message says why.
        """
        self._thread.start()
        self._ready.result()

    def fork(self) -> Started:
        """Start the process of an episode.

        Raises:
            EnvironmentFailedError: the template has ended.
        """
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            number, self._next = self._next, self._next + 1
            ended: Future[str] = Future()
            try:
                if self._lost:
                    raise ConnectionError
                self._ends[number] = ended
                packet = json.dumps({"fork": number}).encode()
                socket.send_fds(self._control, [packet], [theirs.fileno()])
            except OSError:
                ours.close()
                raise EnvironmentFailedError(
                    f"{self._where}: its process ended while an episode began"
                ) from None
        return Started(number, ours, ended)

    def kill(self, number: int) -> None:
        """Kill the process of an episode and all that it has started, unless it has ended."""
        with suppress(OSError):
            self._control.send(json.dumps({"kill": number}).encode())

    def stop(self) -> None:
        """Let the template and all episodes end."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        """Start the process, and take its packets until it ends."""
        try:
            process = self._started()
        except BaseException as error:  # noqa: BLE001 - the thread boundary: `start` raises it
            self._ready.set_exception(error)
            return
        try:
            self._await_ready(process)
            self._ready.set_result(None)
            while packet := self._control.recv(child_main.PACKET_BYTES):
                said = json.loads(packet)
                self._end(said["ended"], said["how"])
        except OSError:
            pass  # the connection broke: as if the process had hung up
        except ConfigError as error:
            self._ready.set_exception(error)
        finally:
            with self._lock:
                self._lost = True
                left = list(self._ends)
            self._control.close()
            _end_process(process)
            for number in left:
                self._end(number, "the end of its template")

    def _end(self, number: int, how: str) -> None:
        """Note how the process of an episode ended."""
        with self._lock:
            self._ends.pop(number).set_result(how)

    def _started(self) -> subprocess.Popen[bytes]:
        """Start the interpreter; ConfigError if that is not possible."""
        spec = os.memfd_create("spec")
        try:
            os.write(spec, json.dumps(self._spec).encode())
            os.lseek(spec, 0, os.SEEK_SET)
            file = str(Path(child_main.__file__))
            with self._theirs as theirs:
                return subprocess.Popen(
                    [self._python, file, str(theirs.fileno()), str(spec)],
                    pass_fds=[theirs.fileno(), spec],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what an environment prints is for the log of the worker
                    env=self._variables(),
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(
                f"{self._where}.python: {self._python} does not start: {error.strerror}"
            ) from None
        finally:
            os.close(spec)

    def _variables(self) -> dict[str, str]:
        """Return the environment variables of the process: those of this one, without what leads
        another interpreter to packages of this one, and with one thread for each library."""
        drop = FOREIGN if self._python != sys.executable else frozenset()
        return ONE_THREAD | {key: each for key, each in os.environ.items() if key not in drop}

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process has imported the environment; ConfigError if it fails."""
        self._control.settimeout(START_TIMEOUT_S)
        try:
            packet = self._control.recv(child_main.PACKET_BYTES)
        except TimeoutError:
            raise ConfigError(
                f"{self._where}: {self._python} did not import the environment within "
                f"{START_TIMEOUT_S:g} s"
            ) from None
        if not packet:
            code = process.wait(END_TIMEOUT_S)
            raise ConfigError(
                f"{self._where}: {self._python} ended with code {code} while it imported the "
                "environment; its last lines are in the log above. It must be Python 3.10 or newer"
            )
        self._control.settimeout(None)
        said = json.loads(packet)
        if "refused" in said:
            advice = ""
            if said["missing"] is not None:
                advice = f"; install it there ({self._python} -m pip install ...)"
            raise ConfigError(f"{self._where}: {self._python}: {said['refused']}{advice}")
        if said["ready"]:
            logger.warning(
                "%s: its import starts threads (%s), which the processes of episodes do not have",
                self._where,
                ", ".join(said["ready"]),
            )


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Wait until a template that has nobody to listen to has ended its episodes; else kill it."""
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
