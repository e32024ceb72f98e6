"""The level `namespaces`: a root of its own, and a pid namespace for each job."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable

from . import linux

INSIDE_ID = 1000
"""User and group that jobs see themselves as. Outside it is an unprivileged user."""

WORK = "/tmp"
"""The one folder that jobs can write to; empty for each."""

_NEW_ROOT = "/tmp"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/shm": WORK,
}


def unshare() -> None:
    """Move to new user, mount, network, IPC and host name namespaces; the user has no id yet."""
    linux.unshare(linux.NEW_USER | linux.NEW_NS | linux.NEW_NET | linux.NEW_IPC | linux.NEW_UTS)


def build_root(places: Iterable[str]) -> None:
    """Make a root that holds `places` at their own paths, devices and /tmp, and enter it.

    All is read-only. Nothing else of the machine can be reached afterwards. The host is then called
    `sandbox`. Call `unshare` first: otherwise this changes the machine itself.

    Args:
        places: absolute paths of folders and files; absent ones are left out.
    """
    linux.set_host_name("sandbox")
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    # What is bound below /tmp may itself lie below /tmp, which the new root hides.
    held = [(place, os.open(place, os.O_PATH)) for place in places if os.path.exists(place)]
    devices = [(f"/dev/{name}", os.open(f"/dev/{name}", os.O_PATH)) for name in _DEVICES]
    linked = {place: os.readlink(place) for place, _ in held if os.path.islink(place)}
    proc = os.open("/proc", os.O_PATH)
    linux.mount("sandbox", _NEW_ROOT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
    for folder in ("/proc", "/dev", WORK):
        os.mkdir(_NEW_ROOT + folder)
    for place, descriptor in sorted(held):
        if place in linked:
            os.makedirs(os.path.dirname(_NEW_ROOT + place), exist_ok=True)
            os.symlink(linked[place], _NEW_ROOT + place)
        else:
            _bind(descriptor, proc, place)
    for place, descriptor in devices:
        _bind(descriptor, proc, place, closed=False)
    for link, target in _LINKS.items():
        os.symlink(target, _NEW_ROOT + link)
    # The kernel lets nobody mount a new /proc who cannot see one: the old one stays, covered.
    linux.mount(f"/proc/self/fd/{proc}", _NEW_ROOT + "/proc", None, linux.MS_BIND | linux.MS_REC)
    linux.mount("none", _NEW_ROOT + "/proc", "tmpfs", linux.MS_RDONLY, "nr_inodes=1,mode=555")
    os.close(proc)
    linux.change_root(_NEW_ROOT)
    read_only = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("none", "/", None, linux.MS_REMOUNT | linux.MS_BIND | read_only)


def _bind(descriptor: int, proc: int, place: str, closed: bool = True) -> None:
    """Bind what `descriptor` holds to `place` in the new root, with all that is mounted below."""
    target = _NEW_ROOT + place
    source = f"/proc/self/fd/{descriptor}"
    if os.path.exists(target):
        return  # it lies in a folder that is bound already
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
    os.close(descriptor)
    if closed:
        linux.close_to_writing(target)


def become_inside_user() -> None:
    """Change from the user that could enter all places to the unprivileged one, keep the rights.

    The rights are those in the own user namespace: nothing outside of it.
    """
    linux.prctl(linux.PR_SET_SECUREBITS, linux.KEEP_CAPS_OVER_SETUID)
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    linux.raise_capabilities()


def make_room(size: int, files: int) -> None:
    """Mount an empty /tmp for this job.

    Args:
        size: bytes that fit into it.
        files: files and folders that fit into it.
    """
    options = f"size={size},nr_inodes={files + 1},mode=1777"
    linux.mount("tmp", WORK, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)


def show_processes() -> bool:
    """Mount a /proc that shows the processes of this pid namespace and nothing of the machine.

    Return False where the kernel refuses (before Linux 5.8, or where a container masks /proc):
    then jobs have no /proc.
    """
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    try:
        linux.mount("proc", "/proc", "proc", flags, "subset=pid,hidepid=2")
    except OSError:
        return False
    return True


class Nursery:
    """Makes the first process of each job's pid namespace, one ahead.

    It is a process of its own, a fork of the template before that grows: forks of a small process
    are cheap. When a first process ends, the kernel kills all others of its namespace.
    """

    def __init__(self) -> None:
        """Fork it; it ends with this process."""
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.pidfd_open(os.getpid())
        if os.fork() == 0:
            try:
                linux.die_with_parent(parent)
                # The template enters the namespaces of its forks, which is like tracing them. Jobs
                # have none of these processes' rights, so they cannot trace them anyway.
                linux.prctl(linux.PR_SET_DUMPABLE, 1)
                self._link.close()
                _serve_firsts(theirs)
            finally:
                os._exit(1)
        theirs.close()
        os.close(parent)

    def take(self) -> tuple[int, int]:
        """Return pid and pidfd of a new first process.

        Raises:
            OSError: the nursery could not make one.
        """
        self._link.send(b"next")
        message, descriptors, _, _ = socket.recv_fds(self._link, 64, 1)
        if not descriptors:
            raise OSError(f"no new pid namespace: {message.decode()}")
        return int(message), descriptors[0]


def _serve_firsts(link: socket.socket) -> None:
    """Send a first process for each request, until the other end closes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    # The kernel keeps a job's signals from the first process, but for those that have a handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ready = _first_process(link)
    while link.recv(16):
        pid, descriptor = ready
        socket.send_fds(link, [str(pid).encode()], [descriptor])
        os.close(descriptor)
        _collect()
        try:
            ready = _first_process(link)
        except OSError as error:
            link.send(str(error).encode())
            return


def _first_process(link: socket.socket) -> tuple[int, int]:
    """Return pid and pidfd of a child that is the first of a new pid namespace."""
    nursery = os.pidfd_open(os.getpid())
    pid = linux.clone(linux.NEW_PID)
    if pid == 0:
        try:
            linux.die_with_parent(nursery)
            link.close()
            os.closerange(0, 64)
            while True:  # collects the orphans of the namespace, until it is killed
                signal.sigwait({signal.SIGCHLD})
                _collect()
        finally:
            os._exit(1)
    os.close(nursery)
    return pid, os.pidfd_open(pid)


def _collect() -> None:
    """Forget the children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
