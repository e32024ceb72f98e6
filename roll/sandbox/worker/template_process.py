"""The worker's handle of its template: starts it, gives it orders, ends it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .inside.namespaces import INSIDE_ID, WORK
from .inside.packets import receive_packet, send_packet
from .usage import size_and_memory

_HERE = Path(__file__).parent
_START_S = 120.0
"""How long the imports of a template may take."""
FIRST_USER = 1 << 30
"""Plus the worker's pid: the user of its jobs, if root may choose one."""
NOBODY = 65534
"""Where a machine has few ids, the user of the jobs of all workers."""
_SETGID, _SETUID = 6, 7  # bits of capabilities

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from inside.template import main; main({})"

FLAGS = ("-I", "-S", "-B", "-X", "utf8", "-c")
"""Python without the user's environment, packages and caches."""

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "TMPDIR": WORK,
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "LANG": "C.UTF-8",
    # A process with threads should not fork; these would start some when imported.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}
"""All environment variables that a job has."""


class BrokenTemplateError(Exception):
    """The template is gone, or does not do what it should. The message says what was seen."""


class TemplateProcess:
    """A running template. Its jobs are forks of it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Start a template and wait until it has imported its modules.

        Args:
            settings: `level`, `places`, `path` and `preload` of `Template`.

        Raises:
            BrokenTemplateError: the level does not work here, or a module cannot be imported.
        """
        self.level: str = settings["level"]
        self.user = unprivileged_user()
        """The user of the jobs, if this process may choose one; else None: its own."""
        self._errors = os.memfd_create("errors")  # no pipe: nobody reads what imports warn of
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *FLAGS, _BOOT.format(theirs.fileno()), str(_HERE)],
                env=ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self._greet(settings)
        except BaseException:
            self.close()
            raise
        self.size, self.memory = size_and_memory(self._process.pid)

    def _greet(self, settings: dict[str, Any]) -> None:
        """Send the template its settings and wait until it is ready; BrokenTemplateError if it
        cannot be."""
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            raise BrokenTemplateError(
                "/proc does not list the children of processes, so those of a program could not be "
                "measured: mount a full /proc, of a kernel with CONFIG_PROC_CHILDREN"
            )
        told = {**settings, "parent": os.getpid(), "user": self.user}
        send_packet(self.link, told)
        answer, _ = self.receive(_START_S)
        if "unshared" in answer:
            self._write_ids()
            send_packet(self.link, {"mapped": True})
            answer, _ = self.receive(_START_S)
        if "error" in answer:
            raise BrokenTemplateError(answer["error"])
        threads = os.listdir(f"/proc/{self._process.pid}/task")
        if len(threads) > 1:
            raise BrokenTemplateError(
                f"the modules of `preload` start {len(threads) - 1} threads when they are imported;"
                " a process with threads cannot be forked safely: leave those modules out"
            )

    def _write_ids(self) -> None:
        """Say which users of the machine the template's user namespace has."""
        folder = Path(f"/proc/{self._process.pid}")
        try:
            if self.user is None:
                (folder / "setgroups").write_text("deny")
                (folder / "uid_map").write_text(f"{INSIDE_ID} {os.geteuid()} 1\n")
                (folder / "gid_map").write_text(f"{INSIDE_ID} {os.getegid()} 1\n")
            else:
                for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
                    (folder / name).write_text(f"0 {own} 1\n{INSIDE_ID} {self.user} 1\n")
        except OSError as error:
            raise BrokenTemplateError(f"cannot map users into the namespace: {error}") from error

    @property
    def pid(self) -> int:
        """Process of the template."""
        return self._process.pid

    def send(self, order: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Order a job.

        Raises:
            BrokenTemplateError: the template is gone.
        """
        try:
            send_packet(self.link, order, descriptors)
        except OSError as error:
            raise BrokenTemplateError(f"the template is gone: {error}") from error

    def receive(self, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """Return the template's next message.

        Raises:
            BrokenTemplateError: it is gone, or silent for `timeout_s`.
        """
        waiting = select.poll()
        waiting.register(self.link, select.POLLIN)
        if not waiting.poll(timeout_s * 1000):
            raise BrokenTemplateError(f"the template has said nothing for {timeout_s:g} s")
        try:
            packet = receive_packet(self.link)
        except OSError as error:
            raise BrokenTemplateError(f"the template is gone: {error}") from error
        if packet is None:
            raise BrokenTemplateError(f"the template ended: {self._last_words()}")
        return packet

    def _last_words(self) -> str:
        """Return the end of its traceback, or its exit code."""
        self._process.kill()  # has no effect if it ended by itself
        code = self._process.wait()
        size = os.fstat(self._errors).st_size
        said = os.pread(self._errors, size, 0).decode("utf-8", "replace").strip()
        return said.splitlines()[-1] if said else f"exit code {code}"

    def close(self) -> None:
        """Kill the template; the kernel kills its jobs with it."""
        self.link.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._errors)


def unprivileged_user() -> int | None:
    """Return a user and group id that nobody else has, for the jobs of this worker.

    Return None if this process may not change its user: jobs then have its own. If the machine has
    few ids (some containers), it is the one of nobody.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    capabilities = int(status.split("CapEff:")[1].split()[0], 16)
    if os.geteuid() != 0 or not capabilities >> _SETUID & capabilities >> _SETGID & 1:
        return None
    for user in (FIRST_USER + os.getpid(), NOBODY):
        if all(_exists(user, Path(f"/proc/self/{name}")) for name in ("uid_map", "gid_map")):
            return user
    return None


def counts_alone(level: str, user: int | None) -> bool:
    """Return whether the kernel counts the processes of a template's jobs apart from all others. It
    counts those of a user, in each user namespace anew; `user` as in `unprivileged_user`."""
    return level == "namespaces" or (level != "none" and user not in (None, NOBODY))


def _exists(user: int, ids: Path) -> bool:
    """Return whether an id is one of a map of ids in /proc (`uid_map`, `gid_map`)."""
    rows = (map(int, line.split()) for line in ids.read_text(encoding="ascii").splitlines())
    return any(first <= user < first + count for first, _, count in rows)
