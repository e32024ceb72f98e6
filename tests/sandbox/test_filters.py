"""The seccomp filters, tried on every call number by an interpreter of their instructions."""

from __future__ import annotations

import errno
import struct

import pytest

from roll.sandbox.levels import LEVELS
from roll.sandbox.worker.inside.seccomp import (
    ALLOW,
    ERRNO,
    EVERYWHERE,
    JOB,
    KILL,
    PROCESSES,
    READING,
    WRITING,
    filter_for,
    for_process,
)
from roll.sandbox.worker.inside.syscalls import AUDIT_ARCH, MACHINES, TABLE

REFUSED, ABSENT = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
PID = 4321


def answer(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """Run a filter as linux/filter.h describes it."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *(*arguments, *[0] * 6)[:6])
    code = list(struct.iter_unpack("<HBBI", program))
    loaded, at = 0, 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        match operation:
            case 0x20:
                (loaded,) = struct.unpack_from("<I", data, value)
            case 0x05:
                at += value
            case 0x15:
                at += if_true if loaded == value else if_false
            case 0x35:
                at += if_true if loaded >= value else if_false
            case 0x45:
                at += if_true if loaded & value else if_false
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(operation)


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def call(machine: str, level: str, name: str, *arguments: int, abi: int = 7) -> int:
    program = for_process(filter_for(level, abi, machine), PID)
    number = TABLE[name][MACHINES.index(machine)]
    if number is None:
        pytest.skip(f"{machine} has no {name}")
    return answer(program, AUDIT_ARCH[machine], number, *arguments)


@pytest.mark.parametrize("level", LEVELS)
def test_only_what_is_listed_is_allowed(machine: str, level: str) -> None:
    names = EVERYWHERE.split()
    if level == "namespaces":
        names += [*READING.split(), *WRITING.split(), *PROCESSES.split()]
    if level == "landlock":
        names += READING.split()
    numbers = {TABLE[name][MACHINES.index(machine)] for name in names}
    program = filter_for(level, 7, machine)
    allowed = {n for n in range(600) if answer(program, AUDIT_ARCH[machine], n) == ALLOW}
    by_argument = "clone prctl fcntl ioctl prlimit64 socketpair personality newfstatat kill sendto"
    by_argument += " recvfrom"
    checked = {TABLE[name][MACHINES.index(machine)] for name in by_argument.split()}
    assert numbers - {None} - checked <= allowed
    assert allowed - numbers <= checked


def test_another_instruction_set_is_killed(machine: str) -> None:
    program = filter_for("namespaces", 7, machine)
    i386, other = 0x40000003, AUDIT_ARCH[MACHINES[1 - MACHINES.index(machine)]]
    assert answer(program, i386, 20) == KILL
    assert answer(program, other, 20) == KILL
    assert answer(program, AUDIT_ARCH[machine], 0x40000000 + 39) == KILL  # x32
    assert len(program) // 8 < 4096


@pytest.mark.parametrize("level", LEVELS)
def test_what_kernels_have_had_holes_in_is_refused(machine: str, level: str) -> None:
    for name in ("landlock_restrict_self", "pivot_root", "mount_setattr"):
        assert call(machine, level, name) == REFUSED
    assert call(machine, level, "clone3") == ABSENT
    assert call(machine, level, "clone", 0x10000000 | 17) == REFUSED
    assert call(machine, level, "socketpair", 1, 1) == ALLOW
    assert call(machine, level, "socketpair", 1, 2) == REFUSED  # datagrams
    assert call(machine, level, "socketpair", 2, 1) == REFUSED
    assert call(machine, level, "fcntl", 0, 8) == REFUSED  # F_SETOWN
    assert call(machine, level, "fcntl", 0, 0) == ALLOW
    assert (call(machine, level, "fcntl", 0, 6) == ALLOW) == (level == "namespaces")  # F_SETLK
    assert call(machine, level, "sendto", 0, 0, 0, 1) == REFUSED  # MSG_OOB
    assert call(machine, level, "recvfrom", 0, 0, 0, 0x40) == ALLOW
    assert call(machine, level, "ioctl", 1, 0x5412) == ERRNO | errno.ENOTTY  # TIOCSTI
    assert call(machine, level, "prctl", 1) == ERRNO | errno.EINVAL  # PR_SET_PDEATHSIG
    assert call(machine, level, "prlimit64", 1) == REFUSED
    assert call(machine, level, "prlimit64", PID) == ALLOW
    assert call(machine, level, "prlimit64", JOB) == REFUSED


@pytest.mark.parametrize("level", ["landlock", "strict"])
def test_processes_of_others_are_out_of_reach_without_namespaces(machine: str, level: str) -> None:
    for name in ("kill", "tgkill"):
        assert call(machine, level, name, PID) == ALLOW
        assert call(machine, level, name, PID + 1) == REFUSED
        assert call(machine, level, name, 0) == REFUSED
        assert call(machine, level, name, 2**32 - 1) == REFUSED
    thread = 0x3D0F00
    assert call(machine, level, "clone", thread) == ALLOW
    assert call(machine, level, "clone", 17) == REFUSED
    assert call(machine, level, "execve") == REFUSED


def test_old_landlock_does_not_watch_truncation(machine: str) -> None:
    truncate = 0o1000
    assert call(machine, "landlock", "openat", 0, 0, truncate, abi=2) == REFUSED
    assert call(machine, "landlock", "openat", 0, 0, 0, abi=2) == ALLOW
    assert call(machine, "landlock", "openat", 0, 0, truncate, abi=3) == ALLOW


def test_nothing_is_opened_at_strict(machine: str) -> None:
    for name in ("open", "openat", "openat2", "creat", "stat", "readlinkat", "getdents64", "chdir"):
        if TABLE[name][MACHINES.index(machine)] is not None:
            assert call(machine, "strict", name) in (REFUSED, ABSENT)
    assert call(machine, "strict", "newfstatat", 0, 0, 0, 0x1000) == ALLOW
    assert call(machine, "strict", "newfstatat") == REFUSED
