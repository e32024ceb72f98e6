"""`Sandbox`: runs programs that nobody trusts."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from roll.sandbox.errors import NoLevelError, SandboxError
from roll.sandbox.levels import LEVELS, NEEDS, NONE, REMOTE, settings
from roll.sandbox.outcome import Job, Limits, Outcome
from roll.sandbox.pool import Pool, Ticket
from roll.sandbox.remote.dialects import DIALECTS
from roll.sandbox.remote.hosts import Host, Remote
from roll.sandbox.remote.start import found_hosts
from roll.sandbox.remote.worker import RemoteWorker
from roll.sandbox.selftest import find_leak
from roll.sandbox.session import Session, SessionWorkers
from roll.sandbox.worker_process import WorkerProcess, as_bytes


class Sandbox:
    """Workers that run programs at one level of isolation. Close it, or use it in `with`.

    Its methods may be called from any thread and any event loop.
    """

    level: str
    """The level that is used."""
    refused: dict[str, str]
    """Why stronger levels are not used, by level."""
    languages: frozenset[str]
    """Languages of programs that it runs."""

    def __init__(
        self,
        level: str = "auto",
        *,
        workers: int | None = None,
        preload: Sequence[str] = (),
        readable: Sequence[str] = (),
        limits: Limits | None = None,
        remote: Remote | None = None,
    ) -> None:
        """Find a level that works on this machine, and start the workers.

        Args:
            level: `auto` (the strongest that passes its self-test), one of `LEVELS`, `remote`, or
                `none`, which isolates nothing.
            workers: programs that run at the same time; None: one for each core, with `remote` as
                many as the hosts run.
            preload: modules that programs find imported, such as `numpy`.
            readable: further folders that programs may read and import from.
            limits: for jobs that name none.
            remote: hosts of the level `remote`, which have `preload` and `readable` of their own.

        Raises:
            ValueError: there is no such level, or the other arguments do not fit it.
            NoLevelError: the level does not work here, or with `auto` none does.
        """
        known = ("auto", *LEVELS, REMOTE, NONE)
        if level not in known:
            raise ValueError(f"level: unknown {level!r}; expected one of {', '.join(known)}")
        self.limits = limits or Limits()
        self.refused = {}
        self._hosts: Sequence[Host] = ()
        self.languages = frozenset({"python"})
        self._pool: Pool[Any]
        if (level == REMOTE) != (remote is not None):
            raise ValueError(f"remote: names the hosts of the level `remote`; found level {level}")
        if remote is not None:
            if preload or readable:
                raise ValueError("preload, readable: with `remote` they are options of the hosts")
            self._begin_remote(remote, workers)
        else:
            self._begin_here(level, workers, tuple(preload), tuple(readable))

    def _begin_here(
        self, level: str, workers: int | None, preload: tuple[str, ...], readable: tuple[str, ...]
    ) -> None:
        """Start workers on this machine."""
        first = None
        for candidate in LEVELS if level == "auto" else (level,):
            try:
                first = _start(candidate, preload, readable)
            except SandboxError as error:
                self.refused[candidate] = str(error)
            else:
                self.level = candidate
                break
        if first is None:
            raise NoLevelError(_refusal(self.refused))
        if level == NONE:
            warnings.warn(
                "the sandbox runs programs at level `none`: they can do what this process can",
                stacklevel=3,
            )
        make = partial(WorkerProcess, settings(self.level, preload, readable))
        count = workers or len(os.sched_getaffinity(0))
        self._pool = Pool(make, [first, *(make() for _ in range(count - 1))])
        self._session_workers = SessionWorkers(make)

    def _begin_remote(self, remote: Remote, workers: int | None) -> None:
        """Ask the hosts; programs run there."""
        self.level, self.languages = REMOTE, frozenset(DIALECTS[remote.protocol].languages)
        try:
            hosts = found_hosts(remote)
        except SandboxError as error:
            raise NoLevelError(f"the level `remote` does not work: {error}") from error
        self._hosts = hosts.all
        make = partial(RemoteWorker, remote, hosts)
        count = workers or hosts.width
        self._pool = pool = Pool(make, [make() for _ in range(count)])
        if workers is None:  # a host that was down may come
            hosts.on_growth = lambda: pool.grow(hosts.width)
        self._session_workers = SessionWorkers(make, most=2 * count)

    @property
    def host_levels(self) -> dict[str, str]:
        """Levels of the hosts that have told theirs, by address; none on this machine."""
        return {host.url: host.level for host in self._hosts if host.level}

    @property
    def width(self) -> int:
        """Programs that run at the same time."""
        return len(self._pool.workers)

    async def run(
        self,
        program: str | bytes,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
        language: str = "python",
    ) -> Outcome:
        """Run one program and wait for its end. If the waiting is cancelled, it is killed.

        Args:
            program: text of a program.
            stdin: what it reads from standard input.
            files: contents of files in its working folder, by relative path.
            limits: None: those of the sandbox.
            language: one of `languages`.

        Raises:
            SandboxError: it could not be run; this is never the program's doing.
            ValueError: the level gives programs no files, or a path leads out of the folder, or the
                language is none that it runs.
        """
        job = Job(program, stdin, files or {}, limits, language)
        return await self._finished(self._submit(job))

    async def run_batch(self, jobs: Iterable[Job]) -> list[Outcome]:
        """Run programs on all workers; return their outcomes in the same order.

        Raises:
            SandboxError: one of them could not be run. The others are killed.
            ValueError: see `run`. The others are killed.
        """
        tickets: list[Ticket] = []
        try:
            for job in jobs:
                tickets.append(self._submit(job))  # those before a wrong job count
            return [await self._finished(ticket) for ticket in tickets]
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise

    def run_now(self, job: Job) -> Outcome:
        """Run one program in the calling thread's time, for callers without an event loop. Errors
        are those of `run`."""
        return self._submit(job).future.result()

    def session(self, limits: Limits | None = None) -> Session:
        """Return a session: a process that keeps its state from call to call.

        It has a worker of its own, which starts when the session is entered, or waits since an
        earlier session has ended. CPU and wall time hold for each call, the other limits for the
        whole. `limits` None: those of the sandbox.
        """
        return Session(self._session_workers, limits or self.limits)

    def close(self) -> None:
        """Kill the programs that run, fail those that wait, end the workers; again: do nothing."""
        self._pool.close()
        self._session_workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, job: Job) -> Ticket:
        """Give a job to the pool; ValueError if its files are more than its limits or its level
        allow, or if its language is none that runs here."""
        if job.language not in self.languages:
            raise ValueError(
                f"language: {job.language!r} does not run at level `{self.level}` here; expected "
                f"one of {', '.join(sorted(self.languages))} (SandboxFusion and Piston, protocols "
                "of the level `remote`, run more)"
            )
        if job.files and self.level == "strict":
            raise ValueError(
                "files: at level `strict` a program opens nothing, so it cannot be given files; "
                "pass them as standard input, or use another level"
            )
        limits = job.limits or self.limits
        size = sum(len(as_bytes(each)) for each in job.files.values())
        if len(job.files) > limits.files or size > limits.disk_mb * 2**20:
            raise ValueError(
                f"files: {len(job.files)} with {size} bytes are more than the limits allow "
                f"(files={limits.files}, disk_mb={limits.disk_mb:g})"
            )
        return self._pool.submit(job, limits)

    async def _finished(self, ticket: Ticket) -> Outcome:
        """Wait for the outcome of a job; kill the job if the waiting is cancelled."""
        try:
            return await asyncio.wrap_future(ticket.future)
        except asyncio.CancelledError:
            ticket.cancel()
            raise


_tested: dict[tuple[str, tuple[str, ...], tuple[str, ...]], str] = {}
"""What the self-tests of this process have found: empty if nothing leaks."""
_testing = threading.Lock()


def _start(level: str, preload: tuple[str, ...], readable: tuple[str, ...]) -> WorkerProcess:
    """Return a worker of a level that has passed its self-test in this process.

    Raises:
        SandboxError: it does not work here, or does not isolate.
    """
    worker = WorkerProcess(settings(level, preload, readable))
    try:
        worker.wait()
        key = (level, preload, readable)
        with _testing:
            if key not in _tested:
                _tested[key] = find_leak(worker, level)
        if _tested[key]:
            raise SandboxError(f"its self-test failed: {_tested[key]}")
    except BaseException:
        worker.close()
        raise
    return worker


def _refusal(refused: Mapping[str, str]) -> str:
    """Return the text of the error that no level works, with the reason of each."""
    reasons = "".join(
        f"\n  {level}: {reason}" + (f" (needs {NEEDS[level]})" if level in NEEDS else "")
        for level, reason in refused.items()
    )
    return (
        f"no level of the sandbox works on this machine:{reasons}\n"
        f"Programs that you trust can be run without isolation: level={NONE!r}"
    )
