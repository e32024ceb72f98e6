"""`RemoteWorker`: runs programs on the host that has the least to do."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from roll.sandbox.errors import SandboxError, WorkerLostError
from roll.sandbox.levels import NONE
from roll.sandbox.outcome import Job, Limits, Outcome, cancelled
from roll.sandbox.remote.connection import Answer, Connection, HostLostError
from roll.sandbox.remote.dialects import DIALECTS
from roll.sandbox.remote.hosts import PAUSE_S, Host, Hosts, Remote
from roll.sandbox.remote.messages import PROTOCOL, read_outcome, text_message

ANSWER_S = 90.0
"""How much longer than a program's limit an answer may take: it may wait at the host, too."""
MOST_LOST = 4
"""Hosts that may be lost one after another while they run a program, which may be what kills them.
A host that has started again may count twice: an old connection is noticed when it is used."""
_SHORT_S = 60.0
_SMALL = 2**16
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
_BUSY = (429, 503)
"""Statuses that say: there is no room now, and nothing has run."""
_PROXY = (502, 504)
"""Statuses of a proxy whose host does not answer."""

T = TypeVar("T")


class RemoteWorker:
    """Takes one program after another, and asks hosts to run them; or holds a session at one host.

    A program whose host is lost runs again at another one. A session ends with its host.
    """

    def __init__(self, remote: Remote, hosts: Hosts) -> None:
        """Connect to nobody yet.

        Args:
            remote: how hosts are asked.
            hosts: the hosts, which other workers share.
        """
        self._remote, self._hosts = remote, hosts
        self._dialect = DIALECTS[remote.protocol]
        token = remote.token
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._links: dict[Host, Connection] = {}
        self._job: tuple[Job, Limits] | None = None
        self._program = b""
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._asking: Connection | None = None
        self._session: tuple[Host, str] | None = None

    def wait(self) -> None:
        """Do nothing: hosts are asked when there is a program."""

    def order(self, job: Job, limits: Limits) -> None:
        """Keep the job; `outcome` runs it."""
        with self._lock:
            self._cancelled.clear()
            self._job = job, limits

    def outcome(self, limits: Limits) -> Outcome:
        """Run the job at a host, and wait for its end.

        Raises:
            SandboxError: no host has run it in time.
            ValueError: a host says that the job is none.
        """
        assert self._job is not None
        message = self._dialect.message(*self._job)
        began = time.monotonic()

        def read(host: Host, answer: Answer) -> Outcome:
            found = _value(host, answer)
            try:
                return self._dialect.outcome(found, limits, answer.took_s)
            except ValueError as error:
                raise SandboxError(f"{host.url}: no outcome of a program: {error}") from None

        try:
            return self._somewhere("POST", self._dialect.path, message, limits, read)
        except _CancelledError:
            return cancelled(time.monotonic() - began)

    def meet(self, host: Host) -> None:
        """Ask a host of `roll sandbox serve` for its width and level; warn of the level `none`.

        Raises:
            SandboxError: it is none, or cannot be reached.
        """
        found = self.health(host)
        try:
            host.width, host.level = max(1, int(found["workers"])), str(found["level"])
        except (KeyError, TypeError, ValueError) as error:
            raise SandboxError(f"{host.url}: its health lacks {error}") from None
        host.told = True
        if host.level == NONE:
            warnings.warn(
                f"{host.url} runs programs at level `none`: they can do there what its server can",
                stacklevel=2,
            )

    def health(self, host: Host) -> dict[str, Any]:
        """Return what a host of `roll sandbox serve` says about itself.

        Raises:
            SandboxError: it is none, or cannot be reached.
        """
        try:
            found = _value(host, self._ask(host, "GET", "/health", None, _SHORT_S, _SMALL))
        except HostLostError as error:
            raise WorkerLostError(f"{host.url}: {error}") from error
        except (_NoRoomError, ValueError) as error:
            raise SandboxError(f"{host.url}: no health: {error}") from None
        if not isinstance(found, dict) or found.get("protocol") != PROTOCOL:
            raise SandboxError(
                f"{host.url}: expected the health of `roll sandbox serve` with protocol "
                f"{PROTOCOL}, found {found!r:.200}; use the same version of roll at both ends"
            )
        return found

    # -- sessions ----------------------------------------------------------------------------

    def open_session(self, job: Job, limits: Limits) -> None:
        """Start a session at a host.

        Raises:
            SandboxError: the protocol has none, or no host has room.
        """
        if self._remote.protocol != "roll":
            raise SandboxError(
                f"{self._remote.protocol} has no sessions, which tools, asserts, pytest files and "
                "checking programs need: use `roll sandbox serve`, or a level of this machine"
            )
        self._cancelled.clear()

        def read(host: Host, answer: Answer) -> tuple[Host, str]:
            found = _value(host, answer)
            if not isinstance(found, dict) or not isinstance(found.get("session"), str):
                raise SandboxError(f"{host.url}: expected a session, found {found!r:.200}")
            return host, found["session"]

        message = {"limits": asdict(limits)}
        self._session = self._somewhere("POST", "/sessions", message, limits, read)

    def order_call(self, program: bytes) -> None:
        """Keep the program; `call_outcome` runs it."""
        with self._lock:
            self._cancelled.clear()
            self._program = program

    def call_outcome(self, limits: Limits) -> tuple[Outcome, bool]:
        """Run the program in the open session; return its outcome and whether the session goes on.

        Raises:
            SandboxError: it could not be run. The session has ended.
            ValueError: the host says that it is no program. The session goes on.
        """
        assert self._session is not None
        host, name = self._session
        message, began = {"program": text_message(self._program)}, time.monotonic()
        path, timeout_s = f"/sessions/{name}/run", limits.wall_s + ANSWER_S

        def ask() -> Any:
            try:
                answer = self._ask(host, "POST", path, message, timeout_s, _most(limits))
            except HostLostError as error:
                raise WorkerLostError(f"{host.url}: the session is lost: {error}") from error
            return _value(host, answer)

        try:
            found = self._with_room(ask)
        except _CancelledError:
            return cancelled(time.monotonic() - began), False
        if not isinstance(found, dict) or not isinstance(found.get("open"), bool):
            raise SandboxError(f"{host.url}: expected an outcome, found {found!r:.200}")
        try:
            return read_outcome(found.get("outcome")), found["open"]
        except ValueError as error:
            raise SandboxError(f"{host.url}: no outcome: {error}") from None

    def end_session(self) -> None:
        """End the session at its host; one that is gone has ended.

        Raises:
            SandboxError: the host cannot be reached. It ends idle sessions by itself.
        """
        session, self._session = self._session, None
        if session is None:
            return
        host, name = session
        self._drop(host)  # the one that a cancelled call has broken off
        self._cancelled.clear()
        try:
            self._ask(host, "DELETE", f"/sessions/{name}", None, _SHORT_S, _SMALL)
        except HostLostError as error:
            raise WorkerLostError(f"{host.url}: {error}") from error

    # -- both --------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Break off the request that runs now; the host kills the program."""
        with self._lock:
            self._cancelled.set()
            if self._asking is not None:
                self._asking.break_off()

    def close(self) -> None:
        """End the session, if there is one, and close all connections."""
        with contextlib.suppress(SandboxError):
            self.end_session()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _somewhere(
        self,
        method: str,
        path: str,
        message: Any,
        limits: Limits,
        read: Callable[[Host, Answer], T],
    ) -> T:
        """Ask one host after another until one has room and does it; return what `read` makes of
        its answer. A host for which `read` raises SandboxError is asked once, if there are others.

        Raises:
            SandboxError: none had room within `patience_s`, or none could do it.
            ValueError: one says that the request is wrong.
        """
        timeout_s, unable = limits.wall_s + ANSWER_S, list[Host]()

        def ask() -> T:
            host, pause_s = self._hosts.take(unable), PAUSE_S
            try:
                answer = self._ask(host, method, path, message, timeout_s, _most(limits))
                if answer.status in _PROXY:
                    raise _NoRoomError(f"{host.url}: status {answer.status}: {answer.error}")
                found = read(host, answer)
                pause_s = 0.0
            except HostLostError as error:
                raise _NoRoomError(f"{host.url}: {error}", accepted=error.accepted) from error
            except ValueError:
                pause_s = 0.0
                raise
            except SandboxError as error:
                unable.append(host)
                if len(unable) < len(self._hosts.all):
                    raise _NoRoomError(str(error), elsewhere=True) from error
                raise
            finally:
                self._hosts.give_back(host, None if self._cancelled.is_set() else pause_s)
            self._meet_late(host)
            return found

        return self._with_room(ask)

    def _meet_late(self, host: Host) -> None:
        """Ask a host that was down at the start for its width and level, now that it lives."""
        if host.told or self._remote.protocol != "roll":
            return
        host.told = True  # one of the workers is enough
        try:
            self.meet(host)
        except (SandboxError, _CancelledError):
            host.told = False  # after the next program
        else:
            self._hosts.on_growth()

    def _with_room(self, ask: Callable[[], T]) -> T:
        """Ask again, with growing waits, while there is no room. Time that a program ran before its
        host was lost is no waiting."""
        patience_s, lost = self._remote.patience_s, 0
        deadline, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
        while True:
            try:
                return ask()
            except _NoRoomError as error:
                why = error
            if why.accepted:
                lost += 1
                if lost == MOST_LOST:
                    raise SandboxError(
                        f"a program was given up with the {lost}th host that was lost while it "
                        f"ran; the last: {why}"
                    )
                deadline, wait_s = time.monotonic() + patience_s, _FIRST_WAIT_S
            if why.elsewhere:
                continue
            # Random, so that programs that were refused together do not come back together.
            pause_s = max(why.after_s, wait_s) * random.uniform(0.5, 1)
            if time.monotonic() + pause_s > deadline:
                raise SandboxError(
                    f"no host of the sandbox took a program within {patience_s:g} s; "
                    f"the last said: {why}"
                )
            if self._cancelled.wait(pause_s):
                raise _CancelledError
            wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)

    def _ask(
        self, host: Host, method: str, path: str, message: Any, timeout_s: float, most: int
    ) -> Answer:
        """Ask a host, where `cancel` finds it.

        Raises:
            HostLostError: there is no answer.
        """
        with self._lock:
            if self._cancelled.is_set():
                raise _CancelledError
            link = self._links.setdefault(host, Connection(host.url, self._headers))
            self._asking = link
        try:
            return link.ask(method, path, message, timeout_s=timeout_s, most_bytes=most)
        except HostLostError:
            if self._cancelled.is_set():
                raise _CancelledError from None
            raise
        finally:
            with self._lock:
                self._asking = None
                if self._cancelled.is_set():
                    self._drop(host)

    def _drop(self, host: Host) -> None:
        link = self._links.pop(host, None)
        if link is not None:
            link.close()


class _NoRoomError(Exception):
    """Error: another try, perhaps elsewhere, may succeed."""

    def __init__(
        self, why: str, *, after_s: float = 0.0, accepted: bool = False, elsewhere: bool = False
    ) -> None:
        """Keep what is known of the try.

        Args:
            why: what the host said, or what became of it.
            after_s: when it wants to be asked again.
            accepted: whether it was lost with the program.
            elsewhere: whether another host can be asked at once.
        """
        super().__init__(why)
        self.after_s, self.accepted, self.elsewhere = after_s, accepted, elsewhere


class _CancelledError(Exception):
    """Error: nobody waits for the program any more."""


def _value(host: Host, answer: Answer) -> Any:
    """Return the JSON value of an answer.

    Raises:
        _NoRoomError: the host has no room.
        ValueError: the host says that the request is wrong.
        SandboxError: the host could not do it, or the answer is none.
    """
    if answer.status in _BUSY:
        raise _NoRoomError(f"{host.url}: no room ({answer.error})", after_s=answer.retry_after_s)
    if answer.status in (400, 413):
        raise ValueError(answer.error)
    if answer.status == 401:
        raise SandboxError(f"{host.url}: the host refuses the token: {answer.error}")
    if answer.status != 200:
        raise SandboxError(f"{host.url}: status {answer.status}: {answer.error}")
    try:
        return answer.json()
    except (ValueError, RecursionError) as error:
        raise SandboxError(f"{host.url}: the answer is no JSON: {error}") from None


def _most(limits: Limits) -> int:
    """Return how large an answer may be: a byte of output takes up to six characters of JSON."""
    return _SMALL + 12 * limits.output_bytes
