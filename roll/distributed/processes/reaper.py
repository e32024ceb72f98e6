"""Ends what a killed process leaves behind: a tiny process that outlives it and kills its children.

A worker that is killed cannot clean up, and Ray kills direct children only; an engine's
processes are grandchildren. Every one of them inherits the worker's token in its environment; the
worker itself has it there, or, where the fork server made it, as the name of an open file. The
reaper leaves the worker's tree at once (Ray kills that), sleeps until the worker is gone, kills
whatever carries the token, and exits. The driver has one too, for Ray itself. Run as a file with
`python -I -S`: it imports nothing heavy.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

GIVE_UP_S = 60.0
"""After the worker's end; what lives longer hangs in the kernel."""

LOOKS = 3
"""A process may be born while the list is read; so many empty-handed looks are enough."""


def start_reaper(token: str) -> None:
    """Watch over this process; the reaper itself carries no token."""
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), token]
    # The first process only forks and exits, so this wait is short.
    subprocess.run(command, env={}, stdin=subprocess.DEVNULL, check=True, timeout=60)


def kill_marked(token: str) -> int:
    """Kill every process that carries `token`; returns how many there were."""
    found = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if not _carries(f"/proc/{name}", token):
                continue
            os.kill(int(name), signal.SIGKILL)
        except OSError:  # gone, or not ours
            continue
        found += 1
    return found


def _carries(process: str, token: str) -> bool:
    """Whether its environment holds the token, or, in a fork of the fork server, the name of a file
    in memory that it has open."""
    with open(f"{process}/environ", "rb") as environ:
        if token.encode() in environ.read():
            return True
    for descriptor in os.listdir(f"{process}/fd"):
        try:
            if os.readlink(f"{process}/fd/{descriptor}").startswith(f"/memfd:{token}"):
                return True
        except OSError:  # closed meanwhile
            continue
    return False


def end_marked(token: str, timeout_s: float) -> bool:
    """Kill what carries `token` until there is nothing left; False when that takes longer."""
    empty = 0
    deadline = time.monotonic() + timeout_s
    while empty < LOOKS and time.monotonic() < deadline:
        empty = 0 if kill_marked(token) else empty + 1
        time.sleep(0.05)
    return empty == LOOKS


def _wait_for_exit(pid: int) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            poll = select.poll()
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except OSError:
            return
        poll.poll()
        return
    while True:
        try:
            os.kill(pid, 0)
        except OSError:
            return
        time.sleep(0.5)


def _main(pid: int, token: str) -> None:
    if os.fork():
        return
    os.setsid()
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # a batch system sends one to every process of a job
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # else a test's or a shell's pipe would stay open
        os.dup2(null, descriptor)
    _wait_for_exit(pid)
    end_marked(token, GIVE_UP_S)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
