"""The seccomp filters: which system calls a job may make at each level. All others are refused."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .syscalls import AUDIT_ARCH, machine, number

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
JOB = 0x7E57_10B5
"""Stands for the job's own pid in a filter until `for_process` puts it in."""

# Classic BPF: load a word; jump always, if equal, if greater or equal, if any bit is set; return.
LOAD, JUMP, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
X32 = 0x40000000
NEW_NAMESPACES, CLONE_PARENT, CLONE_THREAD = 0x7E020080, 0x8000, 0x10000
O_TRUNC = 0o1000

EVERYWHERE = """
brk mmap munmap mprotect mremap madvise msync mlock munlock munlockall membarrier read write readv
writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup dup2 dup3 pipe
pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime 
shutdown getsockopt getsockname getpeername fadvise64 flock clock_gettime clock_getres
clock_nanosleep nanosleep gettimeofday time times alarm setitimer getitimer pause timer_create
timer_settime timer_gettime timer_getoverrun timer_delete rt_sigaction rt_sigprocmask
rt_sigpending rt_sigtimedwait rt_sigsuspend rt_sigreturn sigaltstack restart_syscall futex
set_robust_list get_robust_list set_tid_address rseq sched_yield sched_getaffinity sched_getparam
sched_getscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval getcpu
arch_prctl getpid gettid getppid getpgrp getpgid getsid getuid geteuid getgid getegid getresuid
getresgid getgroups capget getrlimit setrlimit getrusage getpriority ioprio_get uname sysinfo
getrandom umask exit exit_group fstat getcwd
"""
READING = """
open openat stat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink
readlinkat getdents getdents64 chdir fchdir
"""
WRITING = """
creat mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat
truncate ftruncate fallocate fsync fdatasync chmod fchmod fchmodat utime utimes futimesat utimensat
sendfile copy_file_range
"""
PROCESSES = """
fork vfork execve wait4 waitid kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo setsid setpgid
"""
ABSENT = "clone3 openat2 epoll_pwait2 futex_waitv"
"""Calls that look absent, because the C library knows older ones that do the same."""


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on one argument of a call. All checks of a call must pass.

    Compares the argument's lower 32 bits, as the kernel does in these calls.
    """

    call: str
    argument: int
    values: Sequence[int] = ()
    """Allowed values; empty: any."""
    needed: int = 0
    """A bit that must be set; 0: none."""
    refused: int = 0
    """Bits that must not be set."""
    error: int = errno.EPERM


CHECKS = (
    # AF_UNIX and SOCK_STREAM: what asyncio wakes itself with; SOCK_SEQPACKET: how Rust starts
    # processes. A datagram socket of a pair could send to any other.
    Check("socketpair", 0, values=(1,)),
    Check("socketpair", 1, values=(1, 1 | 0x800, 1 | 0x80000, 1 | 0x80800, 5 | 0x80000)),
    # Name, dumpable, seccomp, timer slack, no_new_privs, names of memory. Not: PDEATHSIG, PTRACER.
    Check("prctl", 0, values=(3, 15, 16, 21, 30, 39, 0x53564D41), error=errno.EINVAL),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
    Check("ioctl", 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), error=errno.ENOTTY),
    # Not: MSG_OOB, which nobody uses and which kernels have had holes in.
    Check("sendto", 3, refused=1),
    Check("recvfrom", 3, refused=1),
    Check("personality", 0, values=(0xFFFFFFFF,)),
    Check("prlimit64", 0, values=(0, JOB)),
)
# Commands of fcntl: duplicates, flags, pipe size (to read), seals (to read). Not: F_SETOWN and
# F_SETSIG, which send signals.
COMMANDS = (0, 1, 2, 3, 4, 1030, 1032, 1034)
LOCKS = (5, 6, 7, 36, 37, 38)


def filter_for(level: str, landlock_abi: int = 0, of: str | None = None) -> bytes:
    """Return the filter of a level, with `JOB` in place of the job's pid.

    Args:
        level: `namespaces`, `landlock` or `strict`.
        landlock_abi: version of landlock; before 3, it lets a file be truncated that is only read.
        of: instruction set; None for this machine's.
    """
    names = EVERYWHERE.split()
    checks = [*CHECKS]
    if level == "namespaces":
        names += [*READING.split(), *WRITING.split(), *PROCESSES.split()]
        checks += [
            Check("clone", 0, refused=NEW_NAMESPACES | CLONE_PARENT),
            Check("fcntl", 1, values=COMMANDS + LOCKS),
        ]
    else:
        checks += [
            Check("fcntl", 1, values=COMMANDS),
            Check("clone", 0, needed=CLONE_THREAD, refused=NEW_NAMESPACES),
            Check("kill", 0, values=(JOB,)),
            Check("tgkill", 0, values=(JOB,)),
        ]
    if level == "landlock":
        names += READING.split()
        if landlock_abi < 3:
            names = [name for name in names if name not in ("open", "openat")]
            checks += [Check("open", 1, refused=O_TRUNC), Check("openat", 2, refused=O_TRUNC)]
    if level == "strict":
        at_empty_path = 0x1000  # how newer C libraries spell fstat
        checks.append(Check("newfstatat", 3, needed=at_empty_path))
    return _assemble(names, checks, of or machine())


def for_process(program: bytes, pid: int) -> bytes:
    """Return a filter of `filter_for` for the process `pid`."""
    return program.replace(struct.pack("I", JOB), struct.pack("I", pid))


def _assemble(allowed: Iterable[str], checks: Iterable[Check], of: str) -> bytes:
    """Return instructions that find a call's answer by halving the range of numbers.

    The kernel tries a new filter on every number, so a filter that asks one number after another
    would cost each job a third of a millisecond.

    Args:
        allowed: names of the calls that need no check.
        checks: conditions of the calls that are allowed only with them.
        of: instruction set.
    """
    answers: dict[int | None, list[bytes]] = {}
    for name in allowed:
        answers[number(name, of)] = [_op(RETURN, ALLOW)]
    tests: dict[int | None, list[bytes]] = {}
    for check in checks:
        tests.setdefault(number(check.call, of), []).extend(_test(check))
    for call, test in tests.items():
        answers[call] = [*test, _op(RETURN, ALLOW)]
    for name in ABSENT.split():
        answers[number(name, of)] = [_op(RETURN, ERRNO | errno.ENOSYS)]
    refuse = [_op(RETURN, ERRNO | errno.EPERM)]
    runs: list[tuple[int, list[bytes]]] = []  # first number, and the answer from there on
    for each in range(max(filter(None, answers)) + 2):
        answer = answers.get(each, refuse)
        if not runs or runs[-1][1] != answer:
            runs.append((each, answer))
    code = [
        _op(LOAD, 4),
        _op(EQUAL, AUDIT_ARCH[of], 1, 0),
        _op(RETURN, KILL),  # int 0x80 on x86_64
        _op(LOAD, 0),
        _op(AT_LEAST, X32, 0, 1),
        _op(RETURN, KILL),
    ]
    return b"".join(code + _search(runs))


def _search(runs: Sequence[tuple[int, list[bytes]]]) -> list[bytes]:
    """Return the instructions that reach the answer of the run in which the loaded number lies."""
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    below = _search(runs[:middle])
    return [
        _op(AT_LEAST, runs[middle][0], 0, 1),
        _op(JUMP, len(below)),
        *below,
        *_search(runs[middle:]),
    ]


def _test(check: Check) -> list[bytes]:
    """Return the instructions that refuse the call, or go on after the last one."""
    refuse = _op(RETURN, ERRNO | check.error)
    code = [_op(LOAD, 16 + 8 * check.argument)]
    if check.needed:
        code += [_op(ANY_BIT, check.needed, 1, 0), refuse]
    if check.refused:
        code += [_op(ANY_BIT, check.refused, 0, 1), refuse]
    if check.values:
        last = len(check.values)
        code += [_op(EQUAL, value, last - n, 0) for n, value in enumerate(check.values)]
        code.append(refuse)
    return code


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return a BPF instruction; `if_true` and `if_false` are numbers of instructions to skip."""
    return struct.pack("HBBI", code, if_true, if_false, value)
