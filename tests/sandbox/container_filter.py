"""The seccomp filter that Docker gives a container by default, for x86_64.

Written after the published profile (moby, profiles/seccomp/default.json) for a container without
added capabilities: what it refuses, the rest is allowed. Kubernetes' RuntimeDefault is the same.
"""

from __future__ import annotations

import errno
import struct

from roll.sandbox.worker.inside import linux

# Refused with EPERM; so is whatever is newer than the profile.
# In this order: syslog, uselib, ustat, sysfs, vhangup, pivot_root, _sysctl, acct, settimeofday,
# mount, umount2, swapon, swapoff, reboot, sethostname, setdomainname, iopl,
# ioperm, create_module, init_module, delete_module, get_kernel_syms,
# query_module, quotactl, nfsservctl, getpmsg, putpmsg, afs_syscall, tuxcall,
# security, lookup_dcookie, clock_settime, vserver, mbind, set_mempolicy,
# get_mempolicy, kexec_load, add_key, request_key, keyctl, migrate_pages, unshare,
# move_pages, perf_event_open, fanotify_init, open_by_handle_at, setns, kcmp,
# finit_module, kexec_file_load, bpf, userfaultfd, io_uring_setup, io_uring_enter,
# io_uring_register, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick,
# pidfd_getfd, process_madvise, mount_setattr, quotactl_fd,
# set_mempolicy_home_node.
# fmt: off
REFUSED = (
    103, 134, 136, 139, 153, 155, 156, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172, 173, 174,
    175, 176, 177, 178, 179, 180, 181, 182, 183, 184, 185, 212, 227, 236, 237, 238, 239, 246, 248,
    249, 250, 256, 272, 279, 298, 300, 304, 308, 312, 313, 320, 321, 323, 425, 426, 427, 428, 429,
    430, 431, 432, 433, 438, 440, 442, 443, 450,
)
# fmt: on
NEWEST = 450
CLONE, CLONE3, SOCKET, PERSONALITY = 56, 435, 41, 135
NEW_NAMESPACES, AF_VSOCK = 0x7E020000, 40
PERSONALITIES = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_ABOVE, _JUMP_IF_BITS, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def install() -> None:
    """Bind this process and all that it starts to the filter."""
    refuse, allow = _code(_RETURN, _ERROR | errno.EPERM), _code(_RETURN, _ALLOW)
    argument = _code(_LOAD, 16)
    lines = [_code(_LOAD, 0), _code(_JUMP_IF_ABOVE, NEWEST, 0, 1), refuse]
    for number in REFUSED:
        lines += [_code(_JUMP_IF_EQUAL, number, 0, 1), refuse]
    lines += [_code(_JUMP_IF_EQUAL, CLONE3, 0, 1), _code(_RETURN, _ERROR | errno.ENOSYS)]
    clone = [argument, _code(_JUMP_IF_BITS, NEW_NAMESPACES, 0, 1), refuse, allow]
    socket = [argument, _code(_JUMP_IF_EQUAL, AF_VSOCK, 0, 1), refuse, allow]
    personality = [argument]
    for value in PERSONALITIES:
        personality += [_code(_JUMP_IF_EQUAL, value, 0, 1), allow]
    personality.append(refuse)
    for number, block in ((CLONE, clone), (SOCKET, socket), (PERSONALITY, personality)):
        lines += [_code(_JUMP_IF_EQUAL, number, 0, len(block)), *block]
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    linux.install_filter(b"".join([*lines, allow]))


def _code(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)
