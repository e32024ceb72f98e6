"""`Running`: one job from its order to its end, watched by the worker."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .inside.job import DONE, RAISED, READY
from .inside.namespaces import WORK
from .template_process import BrokenTemplateError, TemplateProcess, counts_alone
from .usage import Usage, descendants, read_usage, shared_memory

LOOK_S = 0.02
"""How often a running job is measured, unless its memory is near the limit."""
_FASTEST = 8 * 2**30
"""Bytes a second by which a job's memory may grow. Near its limit a job is measured as soon as it
could be there."""
_LOOK_SHARE = 0.25
"""Largest part of a core for measuring a job, as its processes may be many."""
IDLE_CPU_S = 0.5
"""CPU time that a session may use between its calls."""
_SETTLE_S = 15.0
"""How long a job may take to be gone after it was killed, or to begin."""
_READ = 1 << 16
_HELPERS = 6
"""Processes of the user beside a job's: template, nursery, the next job, three first ones."""


class Running:
    """A job. The facts about its end come from the kernel, through the template that waits for it:
    its exit code, what it used, what it wrote. It has no way to report about itself."""

    def __init__(
        self,
        template: TemplateProcess,
        limits: Mapping[str, Any],
        pieces: Mapping[str, bytes],
        files: Mapping[str, bytes],
        session: bool,
    ) -> None:
        """Order the job.

        Args:
            template: of which it is a fork.
            limits: fields of `Limits`.
            pieces: `program` and `stdin`.
            files: contents by relative path.
            session: the program comes later, by `call`.

        Raises:
            BrokenTemplateError: the template or the job's setup failed.
        """
        self.template, self.limits, self.session = template, limits, session
        self.verdict: tuple[str, str] | None = None
        """Why it was killed: a status and a reason; None if it was not."""
        self.ended: dict[str, Any] | None = None
        """What the template says about the end; None while it runs."""
        self.written = {"stdout": bytearray(), "stderr": bytearray()}
        self.cut = False
        """Whether it wrote more than is kept."""
        self.peak = 0
        """Most bytes in memory that were measured."""
        self._room: str | None = None
        self._readers: dict[int, str] = {}
        self._channel, self._job_end = socket.socketpair()
        self._pids: list[int] = []
        self._handle = -1
        self._heard = bytearray()
        """What it said on its channel and nobody has looked at."""
        self.cpu_s = 0.0
        """CPU time of the job, or of the last call of a session."""
        self._cpu_before = 0.0
        self._began, self._next_look = time.monotonic(), math.inf  # until the program begins
        self.wall_s = 0.0
        """How long the job, or the last call of a session, took."""
        try:
            self._order(pieces, files)
            self._await_start()
        except BaseException:
            self.close()
            raise

    # -- start ---------------------------------------------------------------------------------

    def _order(self, pieces: Mapping[str, bytes], files: Mapping[str, bytes]) -> None:
        """Send the descriptors to the template and keep the other ends."""
        with ExitStack() as theirs:
            given = [_sealed(pieces["program"]), _sealed(pieces["stdin"])]
            theirs.callback(lambda: _close_all(given))
            for name in self.written:
                mine, other = os.pipe()
                given.append(other)
                self._readers[mine] = name
                os.set_blocking(mine, False)
                if self.template.user is not None:  # so that it can open /dev/stdout
                    os.fchown(other, self.template.user, self.template.user)
            self._channel.setblocking(False)
            given.append(self._job_end.detach())
            if files or self.template.level == "none":
                given.append(self._files(files))
            room = "/" if self._room or self.template.level in ("landlock", "strict") else WORK
            disk = int(self.limits["disk_mb"] * 2**20)
            order = {
                "limits": self._resource_limits(disk),
                "session": self.session,
                "room": room,
                "disk": [disk, self.limits["files"]],
            }
            self.template.send(order, given)

    def _files(self, files: Mapping[str, bytes]) -> int:
        """Return a descriptor through which the job gets its files; the caller closes it.

        At level `namespaces` it is memory that holds all files. At other levels it is a temporary
        folder with the files, kept as `self._room`, which `close` removes.
        """
        if self.template.level == "namespaces":
            names = json.dumps([(name, len(data)) for name, data in files.items()]).encode()
            return _sealed(struct.pack("!I", len(names)) + names + b"".join(files.values()))
        self._room = tempfile.mkdtemp(prefix="sandbox_")
        for name, data in files.items():
            path = Path(self._room, name)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            path.write_bytes(data)
            path.chmod(0o644)
        Path(self._room).chmod(0o755)
        return os.open(self._room, os.O_RDONLY | os.O_DIRECTORY)

    def _resource_limits(self, disk: int) -> list[tuple[str, int]]:
        """Return the limits of each process: nets below what is measured over all of them."""
        memory = int((self.limits["addresses_mb"] or self.limits["memory_mb"]) * 2**20)
        more = max(memory - self.template.memory, 2**24)
        limits = [
            ("RLIMIT_AS", self.template.size + more),
            ("RLIMIT_FSIZE", disk),
            ("RLIMIT_NOFILE", 256),
            ("RLIMIT_CORE", 1),  # with 0, a kernel that pipes core dumps to a program still does so
            ("RLIMIT_MEMLOCK", 2**16),
            ("RLIMIT_MSGQUEUE", 0),
            ("RLIMIT_SIGPENDING", 256),
        ]
        if not self.session:
            limits.append(("RLIMIT_CPU", math.ceil(self.limits["cpu_s"]) + 1))
        if counts_alone(self.template.level, self.template.user):
            limits.append(("RLIMIT_NPROC", self.limits["processes"] + _HELPERS))
        return [(name, value) for name, value in limits if hasattr(resource, name)]

    def _await_start(self) -> None:
        """Wait until the job has given up its rights."""
        answer, handles = self.template.receive(_SETTLE_S)
        self._handle = handles[0]
        self._pids = [pid for pid in (answer["first"], answer["job"]) if pid]
        self._until(lambda: bool(self._heard) or self.ended is not None, _SETTLE_S)
        if not self._heard.startswith(READY):
            said = self._heard.decode("utf-8", "replace")
            said = said or ("it ended" if self.ended else f"not done after {_SETTLE_S:g} s")
            self.stop("cancelled", "its setup failed")
            self.finish()
            raise BrokenTemplateError(f"a job could not give up its rights: {said}")
        del self._heard[:1]
        self._began = time.monotonic()
        self._next_look = self._began + LOOK_S

    # -- watching ------------------------------------------------------------------------------

    def run(self, interrupts: Callable[[], bool], link: socket.socket) -> None:
        """Watch the job until it has ended.

        Args:
            interrupts: is called when `link` can be read; returns whether to stop the job.
            link: from the sandbox.

        Raises:
            BrokenTemplateError: a killed job is still there after `_SETTLE_S`.
        """
        self._until(lambda: self.ended is not None, math.inf, (link, interrupts))
        self.finish()

    def call(
        self, source: bytes, interrupts: Callable[[], bool], link: socket.socket
    ) -> str | None:
        """Run a program in the session; return "ok" or "failed", or None if the session ended.

        For `interrupts` and `link` see `run`.
        """
        self._began, self._cpu_before = time.monotonic(), self._usage().cpu_s
        self._heard.clear()
        for data in self.written.values():
            data.clear()
        try:
            self._channel.setblocking(True)
            self._channel.settimeout(_SETTLE_S)
            self._channel.sendall(struct.pack("!I", len(source)) + source)
        except OSError:
            self.stop("failed", "the session's process does not listen any more")
        finally:
            self._channel.setblocking(False)
        self._until(
            lambda: bool(self._heard) or self.ended is not None, math.inf, (link, interrupts)
        )
        if self.ended is not None or self.verdict is not None:
            self.finish()
            return None
        self._drain()
        self.wall_s = time.monotonic() - self._began
        usage = self._usage()
        self.peak = max(self.peak, usage.memory)
        self.cpu_s, self._cpu_before = usage.cpu_s - self._cpu_before, usage.cpu_s
        return {DONE: "ok", RAISED: "failed"}.get(bytes(self._heard[:1]), "failed")

    def look_idle(self) -> None:
        """Measure a session that nobody calls; stop it if it does not rest."""
        usage = self._usage()
        self._judge_sizes(usage)
        if usage.cpu_s - self._cpu_before > IDLE_CPU_S:
            self.stop("cpu_time", f"used {IDLE_CPU_S:g} s of CPU time between two calls")

    def stop(self, status: str, reason: str) -> None:
        """Kill the job, whatever it does; the first reason counts."""
        if self.verdict is None:
            self.verdict = (status, reason)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def finish(self) -> None:
        """Wait until all of the job's processes are gone, and read what they have written.
        BrokenTemplateError if they are still there after `_SETTLE_S`."""
        self._until(lambda: self.ended is not None, _SETTLE_S)
        if self.ended is None:
            raise BrokenTemplateError(f"a killed job is still there after {_SETTLE_S:g} s")
        self.wall_s = time.monotonic() - self._began
        self.cpu_s = self.ended["cpu_s"] - self._cpu_before
        self.peak = max(self.peak, self.ended["peak_kb"] * 1024)
        self._drain()

    def _until(
        self,
        done: Callable[[], bool],
        timeout_s: float,
        interrupt: tuple[socket.socket, Callable[[], bool]] | None = None,
    ) -> None:
        """Read what comes, and measure, until `done`, or until a killed job should be gone."""
        poll = select.poll()
        for each in (self.template.link.fileno(), self._channel.fileno(), *self._readers):
            poll.register(each, select.POLLIN)
        if interrupt:
            poll.register(interrupt[0].fileno(), select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return
            if self.verdict is not None:
                deadline = min(deadline, now + _SETTLE_S)
            pause_s = min(self._next_look, deadline) - now
            for descriptor, _ in poll.poll(max(0.0, min(pause_s, _SETTLE_S)) * 1000 + 1):
                if not self._take(descriptor, interrupt):
                    poll.unregister(descriptor)
            if self._pids and self.verdict is None and time.monotonic() >= self._next_look:
                self._look()

    def _take(
        self, descriptor: int, interrupt: tuple[socket.socket, Callable[[], bool]] | None
    ) -> bool:
        """Handle a descriptor that can be read; return whether more may come."""
        if descriptor in self._readers:
            return self._read(descriptor)
        if descriptor == self._channel.fileno():
            try:
                said = self._channel.recv(_READ)
            except ConnectionResetError:
                said = b""
            self._heard += said[:_READ]
            return bool(said)
        if descriptor == self.template.link.fileno():
            self.ended = self.template.receive(_SETTLE_S)[0]
            return True
        assert interrupt is not None
        if interrupt[1]():
            self.stop("cancelled", "nobody waits for it any more")
            return False
        return True

    def _read(self, descriptor: int) -> bool:
        """Read one piece of output; return False at its end, and when there is too much."""
        data = self.written[self._readers[descriptor]]
        try:
            piece = os.read(descriptor, _READ)
        except BlockingIOError:
            return True
        data += piece
        limit = self.limits["output_bytes"]
        if len(data) > limit:
            del data[limit:]
            self.cut = True
            self.stop("output", f"wrote more than {limit} bytes to {self._readers[descriptor]}")
            return False
        return bool(piece)

    def _drain(self) -> None:
        """Read what is already written."""
        for descriptor in self._readers:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            while poll.poll(0) and self._read(descriptor):
                pass

    # -- measuring -----------------------------------------------------------------------------

    def _usage(self) -> Usage:
        """Return what all processes of the job use now."""
        return read_usage(self._all_pids())

    def _all_pids(self) -> list[int]:
        """Return the processes of the job; at levels that allow more, with their descendants."""
        several = self.template.level in ("namespaces", "none")
        return list(dict.fromkeys(descendants(self._pids))) if several else self._pids

    def _look(self) -> None:
        """Measure the job, and stop it beyond a limit."""
        began = time.monotonic()
        usage, limits = self._usage(), self.limits
        if usage.cpu_s - self._cpu_before > limits["cpu_s"]:
            self.stop("cpu_time", f"used more than {limits['cpu_s']:g} s of CPU time")
        if time.monotonic() - self._began > limits["wall_s"]:
            self.stop("wall_time", f"took longer than {limits['wall_s']:g} s")
        room = self._judge_sizes(usage)
        now = time.monotonic()
        pause_s = min(LOOK_S, max(room / _FASTEST, (now - began) / _LOOK_SHARE))
        left = self._began + limits["wall_s"] - now
        self._next_look = now + (left if 0 < left < pause_s else pause_s)

    def _judge_sizes(self, usage: Usage) -> int:
        """Stop the job if its processes are too many or have too much memory; pages that several
        share count once. Return the bytes that it may still have."""
        limit = int(self.limits["memory_mb"] * 2**20)
        memory = usage.memory
        if memory > limit:
            memory = shared_memory(self._all_pids(), self.template.memory)
        self.peak = max(self.peak, memory)
        if memory > limit:
            self.stop("memory", f"its processes had more than {self.limits['memory_mb']:g} MB")
        # The first process of a namespace is no part of the job.
        if usage.tasks - (len(self._pids) - 1) > self.limits["processes"]:
            self.stop("processes", f"had more than {self.limits['processes']} processes or threads")
        return limit - memory

    def close(self) -> None:
        """Release descriptors and files. The job has ended."""
        for descriptor in self._readers:
            os.close(descriptor)
        self._channel.close()
        self._job_end.close()
        if self._handle >= 0:
            os.close(self._handle)
        if self._room is not None:
            shutil.rmtree(self._room, ignore_errors=True)


def _close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors of files."""
    for each in descriptors:
        os.close(each)


def _sealed(data: bytes) -> int:
    """Return a descriptor of memory that holds `data` and that nobody can change."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    f_add_seals, seal_shrink_grow_write = 1033, 0xF
    fcntl.fcntl(descriptor, f_add_seals, seal_shrink_grow_write)
    return descriptor
