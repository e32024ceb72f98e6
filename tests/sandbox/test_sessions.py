"""Calls, cancellations and the end of sessions, on workers that are scripted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from roll.commands.sandbox_serve import SandboxServer, _Held
from roll.sandbox import Job, Limits, Outcome, Sandbox, SandboxError, Status
from roll.sandbox.outcome import cancelled
from roll.sandbox.session import Session, SessionWorkers

LONG_S = 20.0
"""Nothing here waits so long unless it fails."""
SENT = Outcome(Status.OK, None, None, "", "", False, 0.0, 0.0, 0.0, "")


class Scripted:
    """A worker that notes what it is told, and whether two threads have waited for it at once."""

    def __init__(self, answer: Callable[[Scripted], Outcome]) -> None:
        self.answer = answer
        """Returns the outcome of a call."""
        self.told: list[str] = []
        self.called, self.stopped, self.ended = (threading.Event() for _ in range(3))
        self.shared = False
        self._waiting = threading.Lock()

    def _told(self, what: str) -> None:
        self.told.append(what)
        self.shared |= not self._waiting.acquire(blocking=False)

    def wait(self) -> None:
        pass

    def order(self, job: Job, limits: Limits) -> None:
        raise NotImplementedError

    def outcome(self, limits: Limits) -> Outcome:
        raise NotImplementedError

    def open_session(self, job: Job, limits: Limits) -> None:
        self.told.append("open")

    def order_call(self, program: bytes) -> None:
        self.told.append("order")

    def call_outcome(self, limits: Limits) -> tuple[Outcome, bool]:
        self._told("call")
        self.called.set()
        try:
            outcome = self.answer(self)
        finally:
            self._waiting.release()
        return outcome, outcome.status is Status.OK

    def end_session(self) -> None:
        self.ended.set()
        self._told("end")
        self._waiting.release()

    def cancel(self) -> None:
        self.told.append("cancel")
        self.stopped.set()

    def close(self) -> None:
        self.told.append("close")


def until_cancelled(worker: Scripted) -> Outcome:
    """Answer a moment after the cancellation, or as soon as somebody else waits for the worker."""
    assert worker.stopped.wait(LONG_S)
    worker.ended.wait(0.2)
    return cancelled()


async def in_call(worker: Scripted, session: Session) -> asyncio.Task[Outcome]:
    """Return a call that the worker has."""
    running = asyncio.create_task(session.run("x"))
    await asyncio.to_thread(worker.called.wait, LONG_S)
    return running


def test_a_session_is_closed_after_the_call_that_is_being_killed() -> None:
    worker = Scripted(until_cancelled)

    async def close() -> None:
        session = Session(SessionWorkers(lambda: worker), Limits())
        await session.__aenter__()
        running = await in_call(worker, session)
        running.cancel()
        await session.__aexit__()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(close())
    assert not worker.shared
    assert worker.told[:4] == ["open", "order", "call", "cancel"]


def test_closing_a_session_kills_its_call() -> None:
    worker = Scripted(until_cancelled)

    async def close() -> None:
        session = Session(SessionWorkers(lambda: worker), Limits())
        await session.__aenter__()
        running = await in_call(worker, session)
        waits = asyncio.create_task(session.run("y"))
        await session.__aexit__()
        await session.__aexit__()
        assert (await running).status is Status.CANCELLED
        with pytest.raises(SandboxError, match="has ended"):
            await waits

    asyncio.run(close())
    assert not worker.shared
    assert worker.told.count("order") == worker.told.count("end") == 1


def test_a_call_that_is_cancelled_twice_is_waited_for() -> None:
    worker = Scripted(until_cancelled)

    async def cancel() -> None:
        async with Session(SessionWorkers(lambda: worker), Limits()) as session:
            running = await in_call(worker, session)
            for _ in range(3):
                running.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await running
            assert not session.open

    asyncio.run(cancel())
    assert not worker.shared


def test_a_call_that_is_cancelled_before_its_turn_is_never_sent() -> None:
    worker, busy = Scripted(until_cancelled), threading.Event()

    async def cancel() -> None:
        async with Session(SessionWorkers(lambda: worker), Limits()) as session:
            session._thread.submit(busy.wait, LONG_S)
            running = asyncio.create_task(session.run("x"))
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.sleep(0)
            busy.set()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(cancel())
    assert worker.told == ["open", "end"]


def test_as_many_sessions_are_called_at_once_as_are_open() -> None:
    count = 40
    together = threading.Barrier(count)

    def answer(worker: Scripted) -> Outcome:
        together.wait(LONG_S)
        return SENT

    workers = SessionWorkers(lambda: Scripted(answer))

    async def one() -> Status:
        async with Session(workers, Limits()) as session:
            return (await session.run("x")).status

    async def all_of_them() -> list[Status]:
        return await asyncio.gather(*(one() for _ in range(count)))

    assert asyncio.run(all_of_them()) == [Status.OK] * count


def test_a_worker_whose_answer_cannot_be_read_is_ended() -> None:
    def broken(worker: Scripted) -> Outcome:
        raise OverflowError("timeout")

    worker = Scripted(broken)

    async def call() -> None:
        async with Session(SessionWorkers(lambda: worker), Limits()) as session:
            with pytest.raises(OverflowError):
                await session.run("x")
            assert not session.open

    asyncio.run(call())
    assert worker.told == ["open", "order", "call", "close"]


def test_a_session_that_is_called_again_while_another_ends_is_not_idle() -> None:
    """The server looks at all of them first, and each takes a while to end."""
    ended: list[str] = []

    class Ending:
        def __init__(self, name: str) -> None:
            self.name = name

        async def __aexit__(self, *_: object) -> None:
            ended.append(self.name)
            for name, held in server._sessions.items():
                held.running += name != self.name

    class Wide:
        width = 1

    server = SandboxServer(cast(Sandbox, Wide()), "", queue=1, most_sessions=9, idle_s=1e-9)
    for name in ("first", "second"):
        server._sessions[name] = _Held(cast(Any, Ending(name)), used=0.0)

    async def watch() -> None:
        watching = asyncio.create_task(server._watch())
        for _ in range(100):
            await asyncio.sleep(0)
        watching.cancel()

    asyncio.run(watch())
    assert ended == ["first"]
    assert [*server._sessions] == ["second"]
