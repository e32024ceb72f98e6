"""`ForkServer`: a process that has imported the modules that workers need; workers are its forks.

Without the server, each worker is a new Python process that imports PyTorch and transformers, which
takes five seconds of a core. On a small machine, all workers of a run then compete for a few cores.
The server is started before the driver imports these modules, so both import at the same time.
Before it forks, the server only imports modules and starts no threads.

Ray starts `fork_client.py` in place of Python (`py_executable` of a runtime environment). The
server is used only for workers on this machine, without GPUs: CUDA does not work in a fork.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path

from roll.distributed.on_ray.environment import (
    KEEP_FREED_MEMORY,
    TUNABLES,
    WITHOUT_TRITON,
    WORKER_TOKEN,
    prepare_ray,
    replace_environment,
)
from roll.distributed.processes import fork_client
from roll.platform.allocator import set_from

ONLY_AT_LOAD = {
    TUNABLES: KEEP_FREED_MEMORY[TUNABLES],  # a running process cannot set this one
    "OPENBLAS_NUM_THREADS": "1",  # otherwise importing numpy starts threads
}
REQUEST_TIMEOUT_S = 10.0
"""Time limit for the request of a client, in seconds. A client that takes longer has been stopped
or killed."""


class ForkServer:
    """The driver's handle of the server process. The server ends with the driver, even if the
    driver is killed."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start the server, without waiting for its imports.

        Args:
            modules: names of the modules to import. They must not import Ray: Ray keeps the
                environment variables of its import, but each fork gets those of its worker.
        """
        prepare_ray()  # marks the forks: the reaper ends them if the driver is killed
        self._name = f"roll_fork_{secrets.token_hex(16)}"
        env = ONLY_AT_LOAD | os.environ
        command = [sys.executable, "-m", "roll.distributed.processes.fork_server"]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self._name}")  # an abstract name: it leaves no file
            listener.listen(1024)  # clients wait here during the imports
            self._process = subprocess.Popen(
                [*command, str(listener.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # hides warnings of the imports
                env=env,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @property
    def python(self) -> str:
        """Shell command that replaces the command `python`."""
        return shlex.join([sys.executable, "-I", "-S", fork_client.__file__, self._name])

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


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """Request of a client: the process that the fork is to become."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    oom: str
    """Content of the client's `oom_score_adj`."""


@dataclass(frozen=True, slots=True)
class _Fork:
    """A fork, which is a worker, and the connection to its client."""

    pid: int
    ended: int
    """File descriptor that becomes readable when the process has ended."""
    client: socket.socket


@dataclass
class _Server:
    """The loop of the server process."""

    listener: socket.socket
    forks: dict[int, _Fork] = field(default_factory=dict)
    """Forks by file descriptor: each is listed under `ended` and under that of `client`."""

    def serve(self) -> _ForkRequest:
        """Make a fork for every client. The method never returns in the server; in each fork, it
        returns the request of the client."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        while True:
            # One event at a time: handling it may close the descriptor of another event, and open a
            # new descriptor with the same number.
            descriptor, _ = poll.poll()[0]
            if descriptor != self.listener.fileno():
                self._settle(descriptor, self.forks[descriptor], poll)
            elif (wanted := self._accept(poll)) is not None:
                return wanted

    def _accept(self, poll: select.poll) -> _ForkRequest | None:
        """Make a fork for one client. Return the request in the fork, None in the server."""
        client, _ = self.listener.accept()
        client.settimeout(REQUEST_TIMEOUT_S)
        streams: list[int] = []
        try:
            if not fork_client.is_ours(client):
                raise PermissionError("a client of another user")
            wanted = _receive(client, streams)
            pid = os.fork()
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
        ):  # also if there is no memory for a fork: the client then starts Python itself
            client.close()
            return None
        else:
            if not pid:
                self._leave(client, streams)
                return wanted
            try:
                ended = os.pidfd_open(pid)
            except OSError:  # too many open files: nobody could tell the client of the fork's end
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                client.close()
                return None
            self._watch(_Fork(pid, ended, client), poll)
            with suppress(OSError):
                client.sendall(fork_client.FORKED)
            return None
        finally:
            for stream in streams:
                os.close(stream)

    def _watch(self, fork: _Fork, poll: select.poll) -> None:
        """Let `serve` notice the end of a fork, and of its client."""
        for descriptor in (fork.ended, fork.client.fileno()):
            self.forks[descriptor] = fork
            poll.register(descriptor, select.POLLIN)

    def _leave(self, client: socket.socket, streams: Sequence[int]) -> None:
        """Close, in a fork, the server's descriptors, and take over the client's streams."""
        for fork in {id(fork): fork for fork in self.forks.values()}.values():
            os.close(fork.ended)
            fork.client.close()
        self.listener.close()
        client.close()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)

    def _settle(self, descriptor: int, fork: _Fork, poll: select.poll) -> None:
        """Handle the end of a fork or of its client. If the fork has ended, send its status to the
        client; if the client has ended, kill the fork."""
        poll.unregister(descriptor)
        if descriptor != fork.ended:
            os.kill(fork.pid, signal.SIGKILL)  # no other process can have this id before `waitpid`
            del self.forks[descriptor]
            return
        _, status = os.waitpid(fork.pid, 0)
        with suppress(OSError):
            fork.client.sendall(fork_client.STATUS.pack(os.waitstatus_to_exitcode(status)))
        if self.forks.pop(fork.client.fileno(), None) is not None:
            poll.unregister(fork.client)
        del self.forks[fork.ended]
        fork.client.close()
        os.close(fork.ended)


def _receive(client: socket.socket, streams: list[int]) -> _ForkRequest:
    """Read and return the request of a client.

    Args:
        streams: receives the descriptors of the client's standard streams, even if reading fails.

    Raises:
        OSError: the client has ended, or is too slow.
        LookupError, TypeError, ValueError: the request is malformed.
    """
    room = socket.CMSG_LEN(3 * array.array("i").itemsize)
    head, rights, _, _ = client.recvmsg(fork_client.LENGTH.size, room)
    for _, _, data in rights:
        streams.extend(array.array("i", data))
    if len(head) < fork_client.LENGTH.size:
        raise ConnectionResetError("the client has gone")
    (size,) = fork_client.LENGTH.unpack(head)
    text = bytearray()
    while len(text) < size:
        piece = client.recv(size - len(text))
        if not piece:
            raise ConnectionResetError("the client has gone")
        text += piece
    found = json.loads(text)
    return _ForkRequest(found["argv"], found["env"], found["cwd"], found["oom"])


def _become(wanted: _ForkRequest) -> None:
    """Turn this fork into the requested Python process, with the modules already imported."""
    os.setpgid(0, 0)  # Ray kills the rest of a worker's process group at its end
    replace_environment(wanted.env)
    os.chdir(wanted.cwd)
    _mark(wanted.env)
    if WITHOUT_TRITON not in wanted.env:
        sys.modules.pop("triton", None)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python reseeds its own generator in a fork, numpy does not
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(wanted.env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    set_from(wanted.env)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(wanted.oom)
    # Skip the options of Python: the server runs in the same interpreter, which has them already.
    argv = list(dropwhile(lambda word: word.startswith("-"), wanted.argv))
    script = argv[0]
    named = [folder for folder in wanted.env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [str(Path(script).parent), *named, *sys.path[1:]]
    sys.argv[:] = argv
    runpy.run_path(script, run_name="__main__")


def _mark(env: Mapping[str, str]) -> None:
    """Mark this fork, by the name of an open file, so that the reaper finds it. For a fork, /proc
    shows the environment with which the server was started, so the variables of the fork are no
    mark."""
    if token := env.get(WORKER_TOKEN):
        os.memfd_create(f"{WORKER_TOKEN}={token}")  # stays open until this process ends


def _main(listener: int, modules: Sequence[str]) -> None:
    """Import the modules, then make forks until the server is killed; each fork becomes a worker.

    In the server this function never returns. In a fork it runs the program that the client of the
    fork asked for.

    Args:
        listener: file descriptor of the socket at which clients connect.
        modules: names of the modules; one that cannot be imported is left out.
    """
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # see `WITHOUT_TRITON`
    os.set_inheritable(listener, False)
    for name in modules:
        with suppress(Exception):  # the worker that needs the module raises a better error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a fork would copy all these pages
    _become(_Server(socket.socket(fileno=listener)).serve())


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
