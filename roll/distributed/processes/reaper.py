"""The reaper: a small process that waits for the end of a worker and kills what the worker left.

A worker that is killed cannot clean up. Ray then kills only its direct children, but the processes
of an engine are grandchildren. All descendants inherit the worker's token in their environment
variables. The worker itself has the token there, or, if the fork server made it, as the name of an
open file.

Python's resource tracker is the last to end. It alone knows the names of shared memory and
semaphores in /dev/shm that its processes have made, as those of vLLM do, and it removes them when
all of these have ended. If it were killed with them, their memory would be taken until the machine
is started again. A name says nothing of its owner, so nobody else could remove it safely. Ray kills
the children and the process group of a worker, so the reaper starts the worker's tracker, when it
is needed.

The reaper leaves the process tree of the worker at once, because Ray kills that tree. It sleeps
until the worker has ended, kills all processes that carry the token, and exits. The driver has a
reaper, too, which ends Ray. This file is run with `python -I -S`, so it imports only small modules.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection

Process = tuple[int, str]
"""Id of a process, and the time at which it started; see `started`."""

GIVE_UP_S = 60.0
"""Time limit of the killing after the worker's end, in seconds. A process that lives longer hangs
in the kernel."""

LOOKS = 3
"""Number of consecutive searches without a match after which no marked process is left. One is not
enough, because a process may start while the list of processes is read."""

TRACKER_S = 20.0
"""Time in which resource trackers must end after all other processes, in seconds."""

LATE_LOOKS = 10
"""Number of further searches of a reaper, one a second; nobody waits for them. Ray starts an agent
again that was killed before Ray, and a process shows no environment while the kernel loads its
program, which takes long on a busy machine."""


def start_reaper(token: str, *, tracker: bool = False) -> None:
    """Start a reaper for this process. The reaper itself does not carry the token.

    Args:
        token: text `NAME=value` of the environment variable that marks the processes.
        tracker: let the reaper start the resource tracker of this process and its children.
    """
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), token]
    if not tracker:
        _run(command)
        return
    from multiprocessing import resource_tracker  # here, as the reaper itself does without it

    names, told = os.pipe()
    _run([*command, str(names)], names)
    os.close(names)
    # As multiprocessing itself does in a child, whose names go to the tracker of its parent.
    vars(resource_tracker._resource_tracker).update(_fd=told, _pid=None)


def _run(command: list[str], *descriptors: int) -> None:
    """Run the reaper's first process, which only forks and exits, so this wait is short."""
    subprocess.run(
        command, env={}, stdin=subprocess.DEVNULL, pass_fds=descriptors, check=True, timeout=60
    )


def started(pid: int) -> str | None:
    """Return the time at which a process started, in clock ticks since the machine's start; None if
    it has ended, even if it is still a zombie, or without /proc. Together with the id this names a
    process for good."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def kill_marked(token: str, *, spare_trackers: bool = False) -> tuple[set[Process], set[Process]]:
    """Kill all processes that carry `token` (see `start_reaper`), except this one; return those
    that were killed, and those that were spared. Without /proc none is found.

    Args:
        spare_trackers: leave Python's resource trackers alone.
    """
    killed, spared = set[Process](), set[Process]()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if not _carries(f"/proc/{name}", token):
                continue
            begun = started(int(name))
            spare = spare_trackers and _is_tracker(f"/proc/{name}")
            if not spare:
                os.kill(int(name), signal.SIGKILL)
        except OSError:  # ended meanwhile, or of another user
            continue
        if begun is not None:
            (spared if spare else killed).add((int(name), begun))
    return killed, spared


def _is_tracker(process: str) -> bool:
    """Return whether the process with this folder in /proc is a resource tracker of Python."""
    with open(f"{process}/cmdline", "rb") as command:
        return b"resource_tracker" in command.read()


def _carries(process: str, token: str) -> bool:
    """Return whether the process with the folder `process` in /proc carries the token: in its
    environment or, if it is a fork of the fork server, as the name of an open file in memory.
    OSError if the process has ended or belongs to another user."""
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


def end_marked(
    token: str,
    timeout_s: float,
    killed: Collection[Process] = (),
    *,
    tracker_s: float = TRACKER_S,
) -> bool:
    """Kill all processes that carry `token` (see `start_reaper`) until none is left. Return False
    if some are left after `timeout_s` seconds.

    Args:
        killed: processes that were killed before. One that ends shows no environment any more, but
            may still have its devices, so they are waited for, too.
        tracker_s: time in which resource trackers must end after all others, in seconds.
    """
    empty = 0
    dying = set(killed)
    deadline = time.monotonic() + timeout_s
    alone_since: float | None = None
    while empty < LOOKS and time.monotonic() < deadline:
        waits = alone_since is None or time.monotonic() < alone_since + tracker_s
        found, trackers = kill_marked(token, spare_trackers=waits)
        dying = {each for each in dying | found if started(each[0]) == each[1]}
        if found or dying:
            alone_since = None
        elif trackers and alone_since is None:
            alone_since = time.monotonic()
        empty = 0 if found or dying or trackers else empty + 1
        time.sleep(0.05)
    return empty == LOOKS


def _wait_for_exit(pid: int, token: str, names: int | None) -> None:
    """Block until a process has ended; return at once if it does not exist.

    Args:
        names: end of the pipe at which the resource tracker is to read names; it is started with
            the first one. None: there is none to start.
    """
    poll, limit_ms, ended = select.poll(), None, False
    if names is not None:
        poll.register(names, select.POLLIN)
    if hasattr(os, "pidfd_open"):
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except OSError:
            limit_ms, ended = 0, True  # what it wrote into the pipe before is read nevertheless
    else:
        limit_ms = 500
    while True:
        ready = dict(poll.poll(limit_ms))
        if names is not None and names in ready:
            poll.unregister(names)
            if ready[names] & select.POLLIN:
                _start_tracker(names, token)
            os.close(names)
            names = None
        elif ready or ended:
            return
        elif limit_ms:
            ended = not _exists(pid)


def _start_tracker(names: int, token: str) -> None:
    """Start Python's resource tracker as a child of this process. It carries the token, so that its
    end is waited for."""
    code = f"from multiprocessing.resource_tracker import main; main({names})"
    name, _, value = token.partition("=")
    command = [sys.executable, "-I", "-S", "-c", code]
    subprocess.Popen(command, env={name: value}, pass_fds=[names])


def _exists(pid: int) -> bool:
    """Return whether there is a process with this id."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _main(pid: int, token: str, names: int | None = None) -> None:
    """Leave a detached process that waits for the end of `pid`, then ends all processes with
    `token`; it ignores end signals.

    Args:
        names: see `_wait_for_exit`.
    """
    if os.fork():
        return
    os.setsid()
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # batch systems send these to all processes of a job
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # otherwise a pipe of a shell or a test would stay open
        os.dup2(null, descriptor)
    _wait_for_exit(pid, token, names)
    end_marked(token, GIVE_UP_S)
    for _ in range(LATE_LOOKS):
        time.sleep(1)
        kill_marked(token, spare_trackers=True)
    end_marked(token, GIVE_UP_S)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
