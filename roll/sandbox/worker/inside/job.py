"""A job: a fork of the template that gives up what it may do, then runs one program."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from . import landlock, linux, namespaces, program, seccomp
from .packets import receive_packet

READY = b"\0"
"""What a job says on its channel when it has given up its rights, before the program begins."""

DONE, RAISED = b".", b"!"
"""What a session says after each call. The program could say it, too: it ends a call, no more."""

_CHANNEL, _FILES = 3, 4
_OUT_OF_THE_WAY, _MOST_DESCRIPTORS = 64, 1 << 16


@dataclass(frozen=True, slots=True)
class World:
    """Things that all jobs of a template share."""

    level: str
    template: int
    """Its pidfd."""
    landlock_abi: int
    places: Sequence[tuple[int, int]]
    """What jobs may read at `landlock` (`landlock.open_places`)."""
    seccomp: bytes
    """The filter (`seccomp.filter_for`); empty at `none`."""
    module: ModuleType
    """The module `__main__` of every job."""


def run_job(world: World, link: socket.socket) -> NoReturn:
    """Become a job: wait for an order, carry it out, and end.

    An order holds `limits`, pairs of a resource's name and its limit; `session`; `room`, the
    working folder; and `disk`, bytes and files that fit into /tmp. Its descriptors are program,
    standard input, output and error, and a channel; then the packed files, or at `landlock` the
    folder of files, if there are any.

    Args:
        world: what the level asks for.
        link: from the template. The job ends if it closes without an order.
    """
    trouble = None
    try:
        _settle(world)
    except Exception as error:  # noqa: BLE001  # there is nobody to tell yet
        trouble = error
    packet = receive_packet(link)
    if packet is None:
        os._exit(0)
    order, descriptors = packet
    source = _read(descriptors[0])
    _arrange(descriptors[1:])
    try:
        if trouble is not None:
            raise trouble
        _give_up_rights(world, order, has_files=len(descriptors) > 5)
        os.write(_CHANNEL, READY)
    except BaseException as error:  # noqa: BLE001  # told to the supervisor, which says it failed
        os.write(_CHANNEL, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    if order["session"]:
        _answer_calls(socket.socket(fileno=_CHANNEL), world.module)
    os.close(_CHANNEL)
    program.run_to_end(source, world.module)


def _settle(world: World) -> None:
    """Do what needs no order, ahead of time."""
    linux.die_with_parent(world.template)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program.seed()
    if world.level == "namespaces":
        linux.unshare(linux.NEW_NS)  # its mounts end with it
        namespaces.show_processes()
    # A fork gets its own copy of a page when it first writes to it: better now than later.
    program.run(b"pass", ModuleType("rehearsal"))
    seccomp.for_process(world.seccomp, os.getpid())


def _arrange(descriptors: Sequence[int]) -> None:
    """Give standard input, output and error, channel and files their numbers."""
    away = [fcntl.fcntl(each, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for each in descriptors]
    for place, each in enumerate(away):
        os.dup2(each, place, inheritable=place < _CHANNEL)


def _give_up_rights(world: World, order: dict[str, Any], has_files: bool) -> None:
    """Bind this process to its level. Nothing of the program has run yet."""
    if world.level == "namespaces":
        namespaces.make_room(*order["disk"])
    for name, limit in order["limits"]:
        _lower(getattr(resource, name), limit)
    places = [*world.places]
    if world.level == "landlock" and has_files:
        places.append((_FILES, landlock.READ_FILE | landlock.READ_DIR))
    os.chdir(order["room"])
    if has_files and world.level in ("landlock", "none"):
        os.fchdir(_FILES)
    if world.level != "none":
        linux.drop_capabilities()
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if world.level == "landlock":
        landlock.restrict(places, world.landlock_abi)
    if world.level == "namespaces":
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # lets the supervisor see how memory is shared
    os.closerange(_FILES + has_files, _MOST_DESCRIPTORS)
    if world.level != "none":
        linux.install_filter(seccomp.for_process(world.seccomp, os.getpid()))
    if world.level == "namespaces" and has_files:
        _unpack(_read(_FILES))
    if has_files:
        os.close(_FILES)
        sys.path.insert(0, os.getcwd())


def _lower(which: int, limit: int) -> None:
    """Set a resource's limit, or its present hard limit if that is lower."""
    hard = resource.getrlimit(which)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (limit, limit))


def _answer_calls(channel: socket.socket, module: ModuleType) -> NoReturn:
    """Run one program after another in the same module."""
    with channel, channel.makefile("rb") as incoming:
        while head := incoming.read(4):
            source = incoming.read(struct.unpack("!I", head)[0])
            try:
                failed = program.run(source, module, echo=True)
            except SystemExit as end:
                program.end(end)
            sys.stdout.flush()
            sys.stderr.flush()
            channel.sendall(RAISED if failed else DONE)
    os._exit(0)


def _unpack(data: bytes) -> None:
    """Write the packed files into the current folder: their names and sizes, then their bytes."""
    (length,) = struct.unpack_from("!I", data)
    start = 4 + length
    for name, size in json.loads(data[4:start]):
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "xb") as file:
            file.write(data[start : start + size])
        start += size


def _read(descriptor: int) -> bytes:
    """Return the whole content of a descriptor, from its beginning."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, size, 0)
    while len(data) < size:
        data += os.pread(descriptor, size - len(data), len(data))
    return data
