"""An event loop in a thread of its own: results, errors, interruptions and the end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from roll.core.threads.loop_thread import LoopThread
from roll.distributed.processes.shutdown import Terminated, orderly_end


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread("test") as own:
        yield own


async def where() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()


async def fail(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def note_the_end(notes: list[str], seconds: float = 60) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.sleep(0.1)  # an end that takes time of its own
        notes.append("ended")


def test_work_runs_in_the_other_thread_and_gives_its_result(loop: LoopThread) -> None:
    thread = loop.run(where())
    assert thread is not threading.current_thread()
    assert loop.submit(where()).result(timeout=5) is thread


def test_what_was_submitted_goes_on_while_nobody_waits(loop: LoopThread) -> None:
    ticks: list[int] = []

    async def tick() -> None:
        for i in range(5):
            ticks.append(i)
            await asyncio.sleep(0.01)

    ticking = loop.submit(tick())
    deadline = time.monotonic() + 60
    while len(ticks) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)  # this thread's own business
    assert ticks == [0, 1, 2, 3, 4]
    ticking.result(timeout=5)


def test_errors_pass_through_as_they_are(loop: LoopThread) -> None:
    error = LookupError("no such prompt")
    with pytest.raises(LookupError) as caught:
        loop.run(fail(error))
    assert caught.value is error
    with pytest.raises(TimeoutError, match="its own"):
        loop.run(fail(TimeoutError("its own")))


def test_a_signal_cancels_what_the_main_thread_waits_for_and_waits_for_its_end(
    loop: LoopThread,
) -> None:
    notes: list[str] = []
    begun = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def run_orderly() -> None:
        with orderly_end() as cleanups:
            cleanups.callback(notes.append, "the wait is over")
            loop.run(note_the_end(notes))

    with pytest.raises(Terminated, match="SIGTERM"):
        run_orderly()
    assert notes == ["ended", "the wait is over"]
    assert time.monotonic() - begun < 5
    assert loop.run(where()), "the loop itself goes on"


def test_a_signal_that_another_thread_receives_ends_the_wait_too(loop: LoopThread) -> None:
    notes: list[str] = []
    threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.run(note_the_end(notes))
    assert time.monotonic() - begun < 5
    assert notes == ["ended"]


def test_a_signal_before_the_first_step_still_cancels(loop: LoopThread) -> None:
    notes: list[str] = []

    async def block() -> None:
        time.sleep(0.4)  # so that what comes next is not begun when the signal comes

    loop.submit(block())
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.run(note_the_end(notes))
    assert time.monotonic() - begun < 5
    assert notes == ["ended"]


def test_work_that_will_not_end_is_given_up_after_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = LoopThread("test", cancel_timeout_s=0.2)
    go = threading.Event()

    async def ignore_the_cancel() -> None:
        while not go.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.run(ignore_the_cancel())
    assert time.monotonic() - begun < 5
    assert "waited 0.2 s for what runs on the event loop 'test' to end" in caplog.text
    go.set()
    loop.close()


def test_closing_cancels_what_is_left_and_takes_nothing_new() -> None:
    notes: list[str] = []
    loop = LoopThread("test")
    left = loop.submit(note_the_end(notes))
    loop.run(asyncio.sleep(0))
    loop.close()
    loop.close()
    assert notes == ["ended"]
    with pytest.raises(concurrent.futures.CancelledError):
        left.result(timeout=5)
    for start in (loop.submit, loop.run):
        with pytest.raises(RuntimeError, match="the event loop 'test' is closed"):
            start(where())


def test_a_blocked_loop_is_left_behind_and_named(caplog: pytest.LogCaptureFixture) -> None:
    blocked, go = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        go.wait(30)

    loop = LoopThread("blocked", cancel_timeout_s=0.2)
    loop.submit(block())
    assert blocked.wait(5)
    begun = time.monotonic()
    loop.close()
    assert time.monotonic() - begun < 5
    assert "waited 0.2 s for the event loop 'blocked' to end" in caplog.text
    assert "block" in caplog.text.rpartition("with: ")[2]
    go.set()


def test_a_loop_does_not_wait_for_itself(loop: LoopThread) -> None:
    async def wait_for_itself() -> None:
        loop.run(where())

    with pytest.raises(RuntimeError, match="the event loop 'test' cannot wait for itself"):
        loop.run(wait_for_itself())


def test_a_task_that_leaves_python_leaves_the_loop_running(loop: LoopThread) -> None:
    """A task passes SystemExit on to its loop, which would end with all that others run there."""

    async def leave() -> None:
        raise SystemExit(3)

    async def both() -> str:
        with pytest.raises(SystemExit):
            await asyncio.gather(leave(), asyncio.sleep(0.01))
        return "went on"

    other = loop.submit(asyncio.sleep(0.1, "the other"))
    assert loop.run(both()) == "went on"
    assert other.result(10) == "the other"
