"""The template: has imported what programs need, and forks itself for each job.

It learns nothing about jobs. Program, input and output are descriptors that it hands to the fork
unread, so no job finds an earlier one in its memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import site
import socket
import sys
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import landlock, linux, namespaces, seccomp
from .job import World, run_job
from .packets import receive_packet, send_packet
from .program import main_module

_END_S = 10.0
"""How long the processes of a killed job may take to be gone."""


def main(descriptor: int) -> None:
    """Be the template of the supervisor at the other end of a socket, until that closes."""
    link = socket.socket(fileno=descriptor)
    packet = receive_packet(link)
    assert packet is not None
    settings = packet[0]
    try:
        template = Template(link, settings)
    except Exception as error:  # noqa: BLE001  # the supervisor tells it to the user
        send_packet(link, {"error": f"{type(error).__name__}: {error}"})
        return
    send_packet(link, {"ready": True})
    template.serve()


class Template:
    """A process that has entered its level as far as one process can for all jobs."""

    def __init__(self, link: socket.socket, settings: dict[str, Any]) -> None:
        """Enter the level and import the modules.

        Args:
            link: socket to the supervisor.
            settings: `level`; `parent`, pid of the supervisor; `places` that jobs may read; `path`,
                the folders of modules; `preload` and `optional`, names of modules; `user`, an
                unprivileged id to change to, or None.

        Raises:
            OSError: the kernel refuses something that the level needs.
            ImportError: a module of `preload` cannot be imported.
        """
        self._link, self._level = link, settings["level"]
        self._nursery: namespaces.Nursery | None = None
        supervisor = os.pidfd_open(os.getppid())
        if os.getppid() != settings["parent"]:
            raise ProcessLookupError("the supervisor has ended")
        abi, places, filter_ = 0, [], b""
        if self._level == "namespaces":
            self._enter_namespaces(settings)
        elif self._level == "landlock":
            abi, places = linux.landlock_abi(), landlock.open_places(settings["places"])
        if self._level != "none":
            filter_ = seccomp.filter_for(self._level, abi)
        _import(settings["path"], settings["preload"], settings["optional"])
        if self._level in ("landlock", "strict") and settings["user"] is not None:
            _change_user(settings["user"], settings["path"] if self._level == "landlock" else [])
        linux.bound_capabilities()
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        linux.die_with_parent(supervisor)
        os.close(supervisor)
        own = os.pidfd_open(os.getpid())
        self._world = World(self._level, own, abi, places, filter_, main_module())

    def _enter_namespaces(self, settings: dict[str, Any]) -> None:
        """Enter new namespaces with a root that holds only `places`; the supervisor meanwhile maps
        the users."""
        if settings["user"] is not None:
            os.setgroups([])
        namespaces.unshare()
        send_packet(self._link, {"unshared": True})
        receive_packet(self._link)  # the supervisor has written who is who
        namespaces.build_root(settings["places"])
        if settings["user"] is not None:
            namespaces.become_inside_user()
        self._nursery = namespaces.Nursery()

    def serve(self) -> None:
        """Carry out one order after another, until the supervisor closes the link."""
        fork = self._fork()
        while (packet := receive_packet(self._link)) is not None:
            self._hand_over(fork, *packet)
            spare = self._fork()  # now, because the next order should not wait for it
            self._see_out(fork, spare)
            fork = spare

    def _fork(self) -> _Fork:
        """Return a new job, which waits for its order."""
        first = self._nursery.take() if self._nursery is not None else None
        if first:
            linux.enter_pid_namespace(first[1])
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = linux.clone()
        if pid == 0:
            try:
                link.close()
                run_job(self._world, theirs)
            finally:
                os._exit(1)
        theirs.close()
        handle = first[1] if first else os.pidfd_open(pid)
        return _Fork(pid, first[0] if first else 0, handle, link)

    def _hand_over(self, fork: _Fork, order: dict[str, Any], descriptors: list[int]) -> None:
        """Give an order and its descriptors to a job that waits; close them here."""
        send_packet(fork.link, order, descriptors)
        for each in (*descriptors, fork.link.detach()):
            os.close(each)
        send_packet(self._link, {"job": fork.pid, "first": fork.first}, [fork.handle])

    def _see_out(self, fork: _Fork, spare: _Fork) -> None:
        """Wait for a job's end, end whatever it has started, and say how it ended.

        Args:
            fork: the job.
            spare: the next one, which goes on.
        """
        _, status, usage = os.wait4(fork.pid, 0)
        if fork.first:
            signal.pidfd_send_signal(fork.handle, signal.SIGKILL)  # the kernel kills the others
            _await_end(fork.handle)
        elif self._level == "none":
            _end_children(spare.pid)
        cpu_s = usage.ru_utime + usage.ru_stime
        send_packet(self._link, {"ended": status, "cpu_s": cpu_s, "peak_kb": usage.ru_maxrss})
        os.close(fork.handle)


@dataclass(frozen=True, slots=True)
class _Fork:
    """A job, from its fork to its end."""

    pid: int
    first: int
    """First process of its pid namespace; 0 if it has no namespace."""
    handle: int
    """Descriptor (pidfd) of the process whose end ends them all."""
    link: socket.socket
    """Takes its order."""


def _await_end(first: int) -> None:
    """Wait until no process of a job's pid namespace is left: the first one ends as the last.

    Raises:
        TimeoutError: they are still there after `_END_S`.
    """
    waiting = select.poll()
    waiting.register(first, select.POLLIN)
    if not waiting.poll(_END_S * 1000):
        raise TimeoutError(f"processes of a killed job are still there after {_END_S} s")


def _end_children(spare: int) -> None:
    """Kill what a job without a namespace has left, but `spare`. Orphans are children here."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            left = [int(child) for child in file.read().split() if int(child) != spare]
        if not left:
            return
        for child in left:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _import(path: list[str], preload: list[str], optional: list[str]) -> None:
    """Import modules from the folders `path`, and take their objects out of garbage collection.

    Those of `optional` may be missing: some builds of Python lack some. Where there are any, jobs
    can import nothing later.
    """
    sys.path[:] = path
    sys.path_importer_cache.clear()
    site.setquit()
    site.setcopyright()
    site.sethelper()
    for name in preload:
        module = importlib.import_module(name)
        if optional:
            _import_lazy_parts(module)
    for name in optional:
        with contextlib.suppress(ImportError):
            _import_lazy_parts(importlib.import_module(name))
    gc.collect()
    gc.freeze()


def _import_lazy_parts(module: ModuleType) -> None:
    """Import what a package imports at its first use, such as `numpy.random`."""
    with warnings.catch_warnings(action="ignore"):
        for name in dir(module):
            with contextlib.suppress(Exception):
                getattr(module, name)


def _change_user(user: int, path: list[str]) -> None:
    """Become an unprivileged user, unless that one cannot enter the folders of `path`.

    In the second case jobs keep the user, without its capabilities: landlock and seccomp bind root
    as well.
    """
    os.setgroups([])
    os.setegid(user)
    os.seteuid(user)
    reachable = all(_can_list(folder) for folder in path)
    os.seteuid(0)
    os.setegid(0)
    if reachable:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _can_list(folder: str) -> bool:
    """Return whether this user may list a folder; True if it does not exist."""
    try:
        os.listdir(folder)
    except PermissionError:
        return False
    except OSError:  # not there, or an archive
        pass
    return True
