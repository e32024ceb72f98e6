"""Start of the level `remote`: which hosts there are, and whether they run a program."""

from __future__ import annotations

import threading
import warnings

from roll.sandbox.errors import SandboxError
from roll.sandbox.outcome import Job, Limits
from roll.sandbox.remote.hosts import Host, Hosts, Remote
from roll.sandbox.remote.worker import RemoteWorker

UNKNOWN_WIDTH = 8
"""Programs at the same time for a host that does not say how many it runs."""
HELLO_CHARS = 2000
"""Length of the output of the first program, more than Piston keeps unless it is told to."""
_HELLO = Job(f"print(str(sum(map(int, input().split()))).ljust({HELLO_CHARS}, '.'))", "19 23")
_HELLO_WALL_S = {"roll": 30.0, "sandbox_fusion": 30.0, "piston": 2.5}  # Piston allows 3 s


def found_hosts(remote: Remote) -> Hosts:
    """Return the hosts, each of which has been asked who it is, and one of which has run a program.

    Raises:
        SandboxError: none answers, or a program does not run there.
    """
    hosts = Hosts(remote.urls)
    if remote.protocol == "roll":
        _ask_all(remote, hosts)
    else:
        for host in hosts.all:
            host.width = UNKNOWN_WIDTH
    limits = Limits(cpu_s=2, wall_s=_HELLO_WALL_S[remote.protocol], memory_mb=512)
    worker = RemoteWorker(remote, hosts)
    try:
        worker.order(_HELLO, limits)
        outcome = worker.outcome(limits)
    except ValueError as error:
        raise SandboxError(f"a host refuses an honest program: {error}") from None
    finally:
        worker.close()
    if not outcome.ok:
        told = f"{outcome.reason}; {outcome.stderr[-300:]}".rstrip("; \n")
        raise SandboxError(f"an honest program did not run: {told}")
    if outcome.stdout.strip() != "42".ljust(HELLO_CHARS, "."):
        raise SandboxError(f"an honest program printed something else: {outcome.stdout[:100]!r}")
    return hosts


def _ask_all(remote: Remote, hosts: Hosts) -> None:
    """Ask all hosts at the same time; leave out nobody, but warn of those that do not answer."""
    failed: dict[str, SandboxError] = {}

    def ask(host: Host) -> None:
        worker = RemoteWorker(remote, hosts)
        try:
            worker.meet(host)
        except SandboxError as error:
            failed[host.url] = error
        finally:
            worker.close()

    threads = [threading.Thread(target=ask, args=(host,)) for host in hosts.all]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(failed) == len(hosts.all):
        raise SandboxError("; ".join(map(str, failed.values())))
    for error in failed.values():
        warnings.warn(f"a host of the sandbox does not answer: {error}", stacklevel=2)
