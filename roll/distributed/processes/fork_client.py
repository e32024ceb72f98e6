"""What Ray starts in place of Python for a worker: it has a fork of the fork server do the work.

It hands over its arguments, environment, folder and standard streams, waits until the fork has
ended, and ends in the same way. When it is killed, the server kills the fork. Where no server
forks for it, it becomes the Python that Ray wanted. Run as a file with `python -I -S`: it imports
nothing heavy.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import struct
import sys

PEER = struct.Struct("3i")
"""What the kernel tells of the other end of a socket: process, user and group."""
LENGTH = struct.Struct("<I")
"""Before a request: its size in bytes."""
FORKED = b"+"
"""What the server says when there is a fork."""
STATUS = struct.Struct("<i")
"""The answer: the exit code of the fork; of a signal, less than 0."""


def is_ours(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user: anybody may connect, or take a name."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    return bool(PEER.unpack(found)[1] == os.geteuid())


def _main(name: str, command: list[str]) -> None:
    connection = socket.socket(socket.AF_UNIX)
    if not _is_forked(connection, name, command):
        os.execv(sys.executable, [sys.executable, *command])
    answer = connection.recv(STATUS.size, socket.MSG_WAITALL)
    status = STATUS.unpack(answer)[0] if len(answer) == STATUS.size else 1
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _is_forked(connection: socket.socket, name: str, command: list[str]) -> bool:
    wanted = {"argv": command, "env": dict(os.environ), "cwd": os.getcwd(), "oom": _oom_score()}
    text = json.dumps(wanted).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
    try:
        connection.connect(f"\0{name}")
        if not is_ours(connection):
            return False
        connection.sendmsg([LENGTH.pack(len(text))], [rights])
        connection.sendall(text)
        return connection.recv(len(FORKED)) == FORKED
    except OSError:
        return False


def _oom_score() -> str:
    """How much rather than others this process is to be killed when memory runs out: Ray says so of
    its workers, which is the fork and not its client."""
    with open("/proc/self/oom_score_adj") as file:
        return file.read()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
