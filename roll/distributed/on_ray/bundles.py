"""`BundledCalls`: many calls to one asynchronous worker in few calls of Ray.

A call of Ray costs the driver and the worker some hundred microseconds each, and an engine or an
environment gets thousands of small ones in a step. So calls that are made at almost the same time
are sent together, and answers come back together: while calls run, one call of Ray (`exchange`)
waits in the worker, and returns when there are answers. A call that is alone takes one call of Ray,
as without bundles.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

import ray

from roll.core.errors import WorkerError
from roll.core.threads.bounded import gives_up
from roll.distributed.dispatch import Apart, Call
from roll.distributed.on_ray.bundle_host import Bundle, Failure, SentCall
from roll.distributed.on_ray.failures import GRACE_S, raise_failure
from roll.distributed.on_ray.members import Member
from roll.distributed.remote_values import RemoteValue
from roll.distributed.watchdog import Watchdog


class BundleActor(Protocol):
    """Actor that takes calls in bundles. The methods return references of Ray."""

    member: Member

    def exchange(self, caller: str, calls: Sequence[SentCall]) -> tuple[Any, Any]:
        """Begin calls; wait for answers. Return references to the `Bundle` and to the parts that
        stay in the object store."""
        ...

    def begin(self, caller: str, calls: Sequence[SentCall]) -> Any:
        """Begin calls, without waiting for them."""
        ...

    def recover(self, caller: str) -> Any:
        """Make the last answers ready again; return a reference to the numbers of known calls."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call whose caller waits."""

    method: str
    apart: Apart | None
    answer: asyncio.Future[Any]


@dataclass(eq=False)
class BundledCalls:
    """Calls of one event loop to one actor. All methods must be called on this loop."""

    actor: BundleActor
    watchdog: Watchdog
    _caller: str = field(default_factory=lambda: uuid.uuid4().hex)
    _numbers: Iterator[int] = field(default_factory=count)
    _unsent: list[SentCall] = field(default_factory=list)
    _asked: dict[int, _Asked] = field(default_factory=dict)
    _running: set[int] = field(default_factory=set)
    """Numbers of the calls that were sent and not answered, also of those whose caller waits no
    more."""
    _collecting: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def ask(self, method: str, call: Call, apart: Apart | None) -> Any:
        """Make a call and return its answer.

        Args:
            apart: rule for a part of the result that stays in the object store, if there is one.

        Raises:
            RollError, WorkerError, WorkerLostError: as `Cluster.ask` does.
        """
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        asked = self._asked[number] = _Asked(method, apart, loop.create_future())
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append(SentCall(number, method, call.args, call.kwargs))
        member = self.actor.member
        self.watchdog.guard(asked.answer, member)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            # Cancelled by the watchdog after a death (then `check` raises), or by the caller, who
            # gets no other error for it even if the worker dies at this moment.
            if not gives_up():
                self.watchdog.check([member])
            raise
        finally:
            self.watchdog.release(asked.answer)
            del self._asked[number]

    def _send(self) -> None:
        """Send the calls that wait, except those whose callers were cancelled."""
        calls = [call for call in self._unsent if call.number in self._asked]
        self._unsent = []
        if calls:
            self._send_together(calls)

    def _send_together(self, calls: list[SentCall]) -> None:
        """Send calls in one bundle. If an argument cannot be sent, send each call by itself, so
        that only the calls with such an argument fail."""
        try:
            if self._collecting:
                begun = self.actor.begin(self._caller, calls)
                self._later(self._watch_begin(begun, calls))
            else:
                refs = self.actor.exchange(self._caller, calls)
                self._collecting = True
                self._later(self._collect(refs))
        except Exception as error:  # noqa: BLE001 - an argument cannot be sent: only its call fails
            if len(calls) == 1:
                self._fail([calls[0].number], error)
            else:
                for call in calls:
                    self._send_together([call])
        else:
            self._running.update(call.number for call in calls)

    async def _watch_begin(self, begun: Any, calls: Sequence[SentCall]) -> None:
        """Fail the calls of a bundle that did not begin."""
        try:
            await _value(begun)
        except ray.exceptions.RayError as error:
            await self.watchdog.settled([self.actor.member], GRACE_S)
            self._fail([call.number for call in calls], error)

    async def _collect(self, refs: tuple[Any, Any]) -> None:
        """Give answers to the callers until all calls are answered."""
        try:
            while True:
                try:
                    bundle = await _value(refs[0])
                except ray.exceptions.RayTaskError as error:
                    sent = set(self._running)  # those sent meanwhile are not known yet
                    known = await _value(self.actor.recover(self._caller))
                    self._fail(sent - known, error)
                else:
                    self._settle(bundle, refs[1])
                if not self._running:
                    return
                refs = self.actor.exchange(self._caller, ())
        except Exception as error:  # noqa: BLE001 - whoever waits gets it
            await self.watchdog.settled([self.actor.member], GRACE_S)
            self._fail(list(self._running), error)
        finally:
            self._collecting = False

    def _settle(self, bundle: Bundle, stored: Any) -> None:
        """Give the answers of a bundle to their callers.

        Args:
            stored: reference to the parts that stay in the object store.
        """
        info = self.actor.member.info
        node = "" if info is None else info.node

        def address(place: int) -> Any:
            return RemoteValue(stored, place, node) if bundle.parts is None else bundle.parts[place]

        for one in bundle.answers:
            self._running.discard(one.number)
            asked = self._asked.get(one.number)
            if asked is None or asked.answer.done():
                continue
            if isinstance(one.value, Failure):
                asked.answer.set_exception(self._error(asked.method, one.value))
            elif one.first is None or asked.apart is None:
                asked.answer.set_result(one.value)
            else:
                addresses = partial(_behind, one.first, address)
                asked.answer.set_result(asked.apart.join(one.value, addresses))

    def _error(self, method: str, failure: Failure) -> Exception:
        """Return the exception of a call that failed in the worker."""
        what = f"{self.actor.member.name}.{method}"
        if failure.error is not None:
            failure.error.add_note(f"raised by {what}\n{failure.trace}")
            return failure.error
        return WorkerError(f"{what} raised {failure.kind}: {failure.message}\n{failure.trace}")

    def _fail(self, numbers: Sequence[int] | set[int], error: Exception) -> None:
        """Fail calls because of an error of Ray, or of their arguments."""
        for number in numbers:
            self._running.discard(number)
            asked = self._asked.get(number)
            if asked is None or asked.answer.done():
                continue
            if not isinstance(error, ray.exceptions.RayError):
                asked.answer.set_exception(error)
                continue
            try:
                raise_failure(error, self.actor.member, asked.method, self.watchdog, grace_s=0)
            except Exception as failure:  # noqa: BLE001 - translated for the caller
                asked.answer.set_exception(failure)

    def _later(self, work: Any) -> None:
        """Run a coroutine as a task on the event loop, without waiting for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)


def _behind(first: int, address: Callable[[int], Any], item: int) -> Any:
    """Return the address of an item of one answer.

    Args:
        first: index of the answer's first item among the parts of the bundle.
        address: function that returns the address of a part of the bundle.
        item: index of the item in the answer.
    """
    return address(first + item)


async def _value(ref: Any) -> Any:
    """Await the value of a reference of Ray."""
    return await asyncio.wrap_future(ref.future())
