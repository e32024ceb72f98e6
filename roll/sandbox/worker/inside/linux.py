"""Linux calls that Python does not offer, through ctypes. Each raises OSError with its name."""

from __future__ import annotations

import ctypes
import os
import select

from .syscalls import machine, number

# unshare, clone, setns (linux/sched.h)
NEW_CGROUP, NEW_UTS, NEW_IPC = 0x02000000, 0x04000000, 0x08000000
NEW_NS, NEW_USER, NEW_PID, NEW_NET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
SIGCHLD = 17

# mount, umount2 (linux/mount.h)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

# prctl (linux/prctl.h)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 28, 36, 38
KEEP_CAPS_OVER_SETUID = 1 << 2  # SECBIT_NO_SETUID_FIXUP

_PR_GET_TID_ADDRESS = 40
_CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x00200000, 0x01000000
_CAPABILITY_VERSION = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def _check(call: str, result: int) -> int:
    """Return the result of a C function; OSError, which names `call`, if it is -1."""
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def _syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call by its name in `TABLE` and return its result; OSError if it fails."""
    found = number(name)
    assert found is not None, name
    typed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _check(name, int(_libc.syscall(ctypes.c_long(found), *typed)))


def unshare(flags: int) -> None:
    """Move this process to new namespaces."""
    _check("unshare", _libc.unshare(flags))


def enter_pid_namespace(of: int) -> None:
    """Let the next forks be born in the pid namespace of a process, given as its pidfd."""
    _check("setns", _libc.setns(of, NEW_PID))


def clone(flags: int = 0) -> int:
    """Fork with `flags`; return the child's pid, or 0 in the child.

    Unlike `os.fork` it calls no hooks of modules, which touch a megabyte. It is safe in a process
    with one thread. The C library keeps the id of that thread; the kernel puts in the child's.
    """
    kept = ctypes.c_void_p()
    asked = (ctypes.c_ulong(_PR_GET_TID_ADDRESS), ctypes.byref(kept), ctypes.c_ulong(0))
    if _libc.prctl(*asked, ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0 and kept.value:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    # The last two are the child's thread id and thread-local storage, in an order of the machine.
    rest = (kept.value or 0, 0) if machine() == "x86_64" else (0, kept.value or 0)
    return _syscall("clone", flags | SIGCHLD, 0, 0, *rest)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2): mount `source` on `target`; OSError if the kernel refuses.

    Args:
        kind: type of the file system; None to bind `source`, or to change a mount.
        flags: `MS_` constants.
        options: options of the file system, separated by commas.
    """
    names = [source.encode(), target.encode(), kind.encode() if kind else None]
    result = _libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None)
    _check(f"mount {kind or source} on {target}", result)


def unmount(target: str) -> None:
    """Detach a mount, though it may be in use."""
    _check(f"umount {target}", _libc.umount2(target.encode(), MNT_DETACH))


def close_to_writing(target: str) -> None:
    """Make a mount and all below it read-only, without devices and setuid programs (Linux 5.12)."""
    rdonly_nosuid_nodev = 0x1 | 0x2 | 0x4
    attributes = b"".join(v.to_bytes(8, "little") for v in (rdonly_nosuid_nodev, 0, 0, 0))
    recursive, here = 0x8000, -100
    _syscall("mount_setattr", here, target.encode() + b"\0", recursive, attributes, len(attributes))


def change_root(new: str) -> None:
    """Make `new` the root of this mount namespace, and let go of the old one."""
    os.chdir(new)
    _syscall("pivot_root", b".\0", b".\0")
    unmount(".")
    os.chdir("/")


def set_host_name(name: str) -> None:
    """Call sethostname(2)."""
    _check("sethostname", _libc.sethostname(name.encode(), len(name)))


def prctl(option: int, value: int = 0) -> None:
    """Call prctl(2)."""
    zero = ctypes.c_ulong(0)
    _check(f"prctl {option}", _libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def raise_capabilities() -> None:
    """Make effective every capability that is permitted."""
    data = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _check("capget", _libc.capget(header, data))
    data[0], data[3] = data[1], data[4]
    _check("capset", _libc.capset(header, data))


def bound_capabilities() -> None:
    """Let nothing that this process or a fork executes have a capability, if that is allowed."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # the last one is behind us, or this process has no CAP_SETPCAP
            break


def drop_capabilities() -> None:
    """Give up every capability."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _check("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, from now on.

    Args:
        parent: pidfd of the parent. Its pid would not do: in a pid namespace of its own, a process
            cannot tell by it that the parent has ended already.
    """
    prctl(PR_SET_PDEATHSIG, 9)
    ended = select.poll()
    ended.register(parent, select.POLLIN)
    if ended.poll(0):  # before the kernel was told
        os._exit(1)


def install_filter(program: bytes) -> None:
    """Install a seccomp filter in this process, for good.

    Args:
        program: BPF instructions, of 8 bytes each. The process has no_new_privs.
    """
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    made = Program(len(program) // 8, ctypes.addressof(code))
    mode_filter = ctypes.c_ulong(2)
    _check("seccomp", _libc.prctl(PR_SET_SECCOMP, mode_filter, ctypes.byref(made)))


def landlock_abi() -> int:
    """Return the version of landlock that the kernel offers.

    Raises:
        OSError: none, or its use is forbidden.
    """
    return _syscall("landlock_create_ruleset", None, 0, 1)


def landlock_ruleset(attributes: bytes) -> int:
    """Return the descriptor of a new ruleset that handles what `attributes` says."""
    return _syscall("landlock_create_ruleset", attributes, len(attributes), 0)


def landlock_allow(ruleset: int, beneath: int, access: int) -> None:
    """Allow `access` to a file, or to all that is beneath a folder, given as a descriptor."""
    rule = access.to_bytes(8, "little") + beneath.to_bytes(4, "little")
    path_beneath = 1
    _syscall("landlock_add_rule", ruleset, path_beneath, rule, 0)


def landlock_restrict(ruleset: int) -> None:
    """Bind this process to a ruleset, for good."""
    _syscall("landlock_restrict_self", ruleset, 0)
