"""`ForkServer`: a process that has imported what workers need; workers are forks of it.

A worker is otherwise a new Python that imports PyTorch and transformers for five seconds of a core,
and on a small machine all workers of a run wait for the same few cores. The server is started
before the driver imports them itself, so both import side by side. It runs nothing but imports, and
starts no thread, before it forks.

Ray starts `fork_client.py` where it would start Python (`py_executable` of a runtime environment).
Only on a machine without GPUs, and for workers of that machine: CUDA does not survive a fork.
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
    TUNABLES: KEEP_FREED_MEMORY[TUNABLES],  # the only one of these that no running process can set
    "OPENBLAS_NUM_THREADS": "1",  # else numpy starts threads as it is imported
}
REQUEST_TIMEOUT_S = 10.0
"""For a client to say what it wants; it was stopped or killed where that takes longer."""


class ForkServer:
    """The server's process, as the driver sees it. It ends with the driver, however that ends."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start it, and do not wait for its imports.

        Args:
            modules: names of what it imports. Not Ray, nor what imports it: that keeps variables
                of the environment which it was imported in, and a fork gets those of its worker.
        """
        prepare_ray()  # forks carry its mark, too, should the driver be killed
        self._name = f"roll_fork_{secrets.token_hex(16)}"
        env = ONLY_AT_LOAD | os.environ
        command = [sys.executable, "-m", "roll.distributed.processes.fork_server"]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self._name}")  # no file is left of it
            listener.listen(1024)  # clients wait here as long as the imports take
            self._process = subprocess.Popen(
                [*command, str(listener.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # warnings of imports, which are not the run's
                env=env,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @property
    def python(self) -> str:
        """The command that takes the place of `python`, for a shell."""
        return shlex.join([sys.executable, "-I", "-S", fork_client.__file__, self._name])

    def close(self) -> None:
        """End it. Forks that still run go on. A second call does nothing."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def can_fork() -> bool:
    """Whether this system has what the server needs, and allows it (Linux 5.3)."""
    if not (hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("probe"))
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a fork becomes."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    oom: str
    """Content of the client's `oom_score_adj`."""


@dataclass(frozen=True, slots=True)
class _Fork:
    """A worker, and the client that stands in for it."""

    pid: int
    ended: int
    """Descriptor that can be read when the process has ended."""
    client: socket.socket


@dataclass
class _Server:
    """Loops in the server's process."""

    listener: socket.socket
    forks: dict[int, _Fork] = field(default_factory=dict)
    """By both descriptors of each."""

    def serve(self) -> _Wanted:
        """Fork for every client; returns in the forks, with what each is to do."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        while True:
            # One at a time: what is done about it may close the descriptor of another one, and open
            # a new one of the same number.
            descriptor, _ = poll.poll()[0]
            if descriptor != self.listener.fileno():
                self._settle(descriptor, self.forks[descriptor], poll)
            elif (wanted := self._accept(poll)) is not None:
                return wanted

    def _accept(self, poll: select.poll) -> _Wanted | None:
        """Fork for one client; None in the server."""
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
        ):  # also no memory for a fork: Ray tries again
            client.close()
            return None
        else:
            if not pid:
                self._leave(client, streams)
                return wanted
            self._watch(_Fork(pid, os.pidfd_open(pid), client), poll)
            with suppress(OSError):
                client.sendall(fork_client.FORKED)
            return None
        finally:
            for stream in streams:
                os.close(stream)

    def _watch(self, fork: _Fork, poll: select.poll) -> None:
        for descriptor in (fork.ended, fork.client.fileno()):
            self.forks[descriptor] = fork
            poll.register(descriptor, select.POLLIN)

    def _leave(self, client: socket.socket, streams: Sequence[int]) -> None:
        """In a fork: close what is the server's, and take the client's streams."""
        for fork in {id(fork): fork for fork in self.forks.values()}.values():
            os.close(fork.ended)
            fork.client.close()
        self.listener.close()
        client.close()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)

    def _settle(self, descriptor: int, fork: _Fork, poll: select.poll) -> None:
        """A fork has ended: tell its client. Or its client has: kill the fork."""
        poll.unregister(descriptor)
        if descriptor != fork.ended:
            os.kill(fork.pid, signal.SIGKILL)  # its number is its own until it is waited for
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


def _receive(client: socket.socket, streams: list[int]) -> _Wanted:
    """What a client wants; its standard streams are put into `streams`, also if it then fails."""
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
    return _Wanted(found["argv"], found["env"], found["cwd"], found["oom"])


def _become(wanted: _Wanted) -> None:
    """Go on as the Python that was wanted, with what this one has imported."""
    os.setpgid(0, 0)  # when a worker has ended, Ray kills what is left of its process group
    replace_environment(wanted.env)
    os.chdir(wanted.cwd)
    _mark(wanted.env)
    if WITHOUT_TRITON not in wanted.env:
        sys.modules.pop("triton", None)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as Python's own generator is in a fork
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(wanted.env.get("OMP_NUM_THREADS", torch.get_num_threads())))
    set_from(wanted.env)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(wanted.oom)
    # Options of Python's come first; the server was started by the same interpreter and variables.
    argv = list(dropwhile(lambda word: word.startswith("-"), wanted.argv))
    script = argv[0]
    named = [folder for folder in wanted.env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [str(Path(script).parent), *named, *sys.path[1:]]
    sys.argv[:] = argv
    runpy.run_path(script, run_name="__main__")


def _mark(env: Mapping[str, str]) -> None:
    """Carry the mark that the reaper looks for: the system shows the environment of a process as it
    was when its program was loaded, which for a fork is the server's."""
    if token := env.get(WORKER_TOKEN):
        os.memfd_create(f"{WORKER_TOKEN}={token}")  # open as long as this process lives


def _main(listener: int, modules: Sequence[str]) -> None:
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # see `WITHOUT_TRITON`
    os.set_inheritable(listener, False)
    for name in modules:
        with suppress(Exception):  # which a worker that needs it tells better
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # to look through all this would copy every page of it in every fork
    _become(_Server(socket.socket(fileno=listener)).serve())


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
