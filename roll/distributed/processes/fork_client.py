"""The program that Ray starts in place of Python for a worker: a client of the fork server.

The client sends its arguments, environment variables, working directory and standard streams to the
server. The server makes a fork, which becomes the worker. The client waits for the end of the fork
and ends with the same exit code or signal. If the client is killed, the server kills the fork. If
no server answers, the client becomes the Python process that Ray wanted.

This file is run with `python -I -S`, so it imports only small modules of the standard library.
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
"""Format of the kernel's facts about the peer of a socket: ids of process, user and group."""
LENGTH = struct.Struct("<I")
"""Format of the first part of a request: the size of the rest, in bytes."""
FORKED = b"+"
"""Message of the server that the fork exists."""
STATUS = struct.Struct("<i")
"""Format of the answer: exit code of the fork, or the negative number of the signal that ended
it."""


def is_ours(connection: socket.socket) -> bool:
    """Return whether the peer is a process of the same user. Processes of other users can connect
    to the socket, too, or listen under its name."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    return bool(PEER.unpack(found)[1] == os.geteuid())


def _main(name: str, command: list[str]) -> None:
    """Let the fork server run a command and end with its exit status or signal; without a server,
    become the command.

    Args:
        name: name of the server's socket.
        command: command line of Python, without the interpreter.
    """
    connection = socket.socket(socket.AF_UNIX)
    if not _request_fork(connection, name, command):
        os.execv(sys.executable, [sys.executable, *command])
    answer = connection.recv(STATUS.size, socket.MSG_WAITALL)
    status = STATUS.unpack(answer)[0] if len(answer) == STATUS.size else 1
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _request_fork(connection: socket.socket, name: str, command: list[str]) -> bool:
    """Send command, environment and standard streams to the fork server; return whether it forked.
    False for any OSError. The arguments are those of `_main`."""
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
    """Return this process's `oom_score_adj`, which says how early the kernel kills it when memory
    runs out. Ray sets it for its worker, so the fork must have it, not only the client."""
    with open("/proc/self/oom_score_adj") as file:
        return file.read()


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
