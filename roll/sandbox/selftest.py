"""The self-test of a level: hostile programs, run on the machine where the level will be used.

What a level is worth depends on the kernel, its settings and the container around it, so it is
tried, not looked up. Each trial is judged by what happened outside.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from roll.sandbox.levels import NONE
from roll.sandbox.outcome import Job, Limits, Outcome, Status
from roll.sandbox.worker.usage import descendants
from roll.sandbox.worker_process import WorkerProcess

_LIMITS = Limits(
    cpu_s=5, wall_s=10, memory_mb=256, processes=8, output_bytes=2**16, files=16, disk_mb=1
)
_SHORT_S, _MOMENT_S = 0.3, 2.0


@dataclass(frozen=True, slots=True)
class Bait:
    """Things of this machine that a program must not reach."""

    secret: str
    """Content of a file that everybody may read, and a word that no program can guess."""
    folder: Path
    """Folder of that file; everybody may write into it."""
    victim: subprocess.Popen[bytes]
    """Process of this user."""
    port: int
    """Of a listening TCP socket."""
    address: str
    """Name of a listening abstract socket."""
    listeners: tuple[socket.socket, ...]


def find_leak(worker: WorkerProcess, level: str) -> str:
    """Return what a program could do that it must not; empty if all trials are contained.

    Args:
        worker: a worker that takes jobs.
        level: its level; at `none` only an honest program is tried.

    Raises:
        SandboxError: a program could not be run.
    """
    with _bait() as bait:
        for trial in (_honest, *_TRIALS) if level != NONE else (_honest,):
            leak = trial(lambda job: worker.run(job, job.limits or _LIMITS), bait)
            if leak:
                return leak
            strays = _strays(worker.pid, level)
            if strays:
                return f"{strays} processes were left running"
    return ""


_Run = Callable[[Job], Outcome]
"""Function that runs a job in the worker under test.

A trial takes it and the bait, and returns what a program could do that it must not; an empty text
if nothing."""


def _honest(run: _Run, bait: Bait) -> str:
    """Run a program that does nothing wrong; return its outcome as text if it fails, else an empty
    text."""
    outcome = run(Job("import json\nprint(json.dumps(sum(map(int, input().split()))))", "19 23"))
    return "" if outcome.ok and outcome.stdout == "42\n" else f"an honest program: {outcome}"


def _read_file(run: _Run, bait: Bait) -> str:
    """Try to read the bait's file; return what leaked, an empty text if nothing did."""
    outcome = run(Job(f"print(open({str(bait.folder / 'secret')!r}).read())"))
    return "a file was read" if bait.secret in outcome.stdout + outcome.stderr else ""


def _write_file(run: _Run, bait: Bait) -> str:
    """Try to make a file in the bait's folder; return what leaked, an empty text if nothing did."""
    target = bait.folder / "written"
    run(Job(f"open({str(target)!r}, 'w').write('x')"))
    return "a file was written" if target.exists() else ""


def _change_file(run: _Run, bait: Bait) -> str:
    """Try to change the mode of the bait's file, and to empty it; return what leaked, an empty text
    if nothing did."""
    target = bait.folder / "secret"
    run(Job(f"import os\nos.chmod({str(target)!r}, 0)"))
    run(Job(f"import os\nos.truncate({str(target)!r}, 0)"))
    whole = target.stat().st_mode & 0o777 and target.stat().st_size
    return "" if whole else "a file was changed"


def _kill(run: _Run, bait: Bait) -> str:
    """Try to kill the bait's process; return what leaked, an empty text if nothing did."""
    run(Job(f"import os\nos.kill({bait.victim.pid}, 9)"))
    return "a process was killed" if bait.victim.poll() is not None else ""


def _own_signal(run: _Run, bait: Bait) -> str:
    """Try to let the kernel kill the bait's process when data arrive in a pipe (`F_SETOWN`,
    `F_SETSIG`); return what leaked, an empty text if nothing did."""
    program = (
        "import fcntl, os\nr, w = os.pipe()\n"
        f"fcntl.fcntl(r, 8, {bait.victim.pid})\nfcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')"
    )
    run(Job(program))
    return "a process was killed by SIGIO" if bait.victim.poll() is not None else ""


def _trace(run: _Run, bait: Bait) -> str:
    """Try to trace the bait's process and to make a namespace; return what leaked, an empty text if
    nothing did."""
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        f"print(libc.ptrace(16, {bait.victim.pid}, 0, 0), libc.unshare(0x10000000))"
    )
    found = run(Job(program)).stdout.split()
    return "a process was traced, or a namespace made" if "0" in found else ""


def _connect(run: _Run, bait: Bait) -> str:
    """Try to connect to the bait's sockets; return what leaked, an empty text if nothing did."""
    places = ((2, ("127.0.0.1", bait.port)), (1, f"\0{bait.address}"))
    for family, place in places:
        run(Job(f"import socket\nsocket.socket({family}).connect({place!r})"))
    for listener in bait.listeners:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            continue
        return "a socket was reached"
    return ""


def _descriptors(run: _Run, bait: Bait) -> str:
    """Look for open descriptors beside the standard ones; return what leaked, an empty text if
    nothing did."""
    program = (
        "import os\nfor n in range(3, 300):\n"
        "    try: print(n, os.fstat(n).st_mode)\n    except OSError: pass"
    )
    outcome = run(Job(program))
    return f"descriptors are open: {outcome.stdout.split()}" if outcome.stdout else ""


def _stay(run: _Run, bait: Bait) -> str:
    """Leave a process, for which the caller looks, and run for ever; return the outcome as text if
    the program was not ended in time, else an empty text."""
    run(Job("import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(60)"))
    limits = Limits(cpu_s=5, wall_s=_SHORT_S, memory_mb=256)
    program = "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: pass"
    outcome = run(Job(program, limits=limits))
    ended = outcome.status is Status.WALL_TIME and outcome.wall_s < _SHORT_S + 2
    return "" if ended else f"an endless program: {outcome}"


def _memory(run: _Run, bait: Bait) -> str:
    """Use more memory than is allowed; return that there is no limit, else an empty text."""
    outcome = run(Job("held = []\nwhile True: held.append(b'x' * 2**20)"))
    kept = not outcome.ok and outcome.peak_mb < 2 * _LIMITS.memory_mb
    return "" if kept else f"memory has no limit: {outcome.status}, {outcome.peak_mb:.0f} MB"


def _output(run: _Run, bait: Bait) -> str:
    """Write more than is allowed; return that there is no limit, else an empty text."""
    outcome = run(Job("while True: print('x' * 4096)"))
    kept = outcome.status is Status.OUTPUT and len(outcome.stdout) <= _LIMITS.output_bytes
    return "" if kept else f"output has no limit: {outcome.status}"


def _disk(run: _Run, bait: Bait) -> str:
    """Fill more disk space than is allowed; return that there is no limit, else an empty text."""
    program = "with open('large', 'wb') as file:\n    file.write(bytes(2**23))\nprint('fits')"
    return "disk space has no limit" if "fits" in run(Job(program)).stdout else ""


def _next_job(run: _Run, bait: Bait) -> str:
    """Leave a name and a file for the next job; return what leaked, an empty text if nothing
    did."""
    run(Job(f"import builtins\nbuiltins.kept = {bait.secret!r}\nopen('kept', 'w').write('x')"))
    outcome = run(
        Job("import builtins, os\nprint(hasattr(builtins, 'kept'), os.path.exists('kept'))")
    )
    return "" if outcome.stdout == "False False\n" else "a job saw what an earlier one left"


_TRIALS: tuple[Callable[[_Run, Bait], str], ...] = (
    _read_file,
    _write_file,
    _change_file,
    _kill,
    _own_signal,
    _trace,
    _connect,
    _descriptors,
    _stay,
    _memory,
    _output,
    _disk,
    _next_job,
    _honest,
)


def _strays(worker: int, level: str) -> int:
    """Return how many processes more than its own a worker has, after a moment.

    Its own are itself, its template and the next job; in `namespaces` also the nursery and the
    first processes of the next two jobs.
    """
    own = 6 if level == "namespaces" else 3
    deadline = time.monotonic() + _MOMENT_S
    while True:
        more = sum(map(_runs, descendants([worker]))) - own
        if more <= 0 or time.monotonic() > deadline:
            return max(more, 0)
        time.sleep(0.005)


def _runs(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except OSError:
        return False


@contextmanager
def _bait() -> Iterator[Bait]:
    """Make the bait, and take it away again at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sandbox_test_")))
        folder.chmod(0o777)
        secret, address = secrets.token_hex(16), f"sandbox_{secrets.token_hex(16)}"
        (folder / "secret").write_text(secret)
        (folder / "secret").chmod(0o666)
        victim = subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", "-c", "input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        network = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(f"\0{address}")
        local.listen()
        for listener in (network, local):
            listener.setblocking(False)
        port = network.getsockname()[1]
        yield Bait(secret, folder, victim, port, address, (network, local))
