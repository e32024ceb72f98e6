"""Calls to asynchronous workers that travel in bundles."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roll.config.sections.roles import Role
from roll.core.errors import DataError, WorkerError, WorkerLostError
from roll.distributed.cluster import Placement
from roll.distributed.dispatch import Call
from roll.distributed.on_ray.actor import RayActor
from roll.distributed.on_ray.bundle_host import STORED_BYTES, BundleHost, SentCall
from roll.distributed.on_ray.bundles import BundledCalls
from roll.distributed.on_ray.cluster import RayCluster
from roll.distributed.on_ray.members import Member
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.remote_contents import contents_here
from roll.distributed.remote_values import RemoteValue
from tests.distributed.small_workers import Oracle

MANY = 400
PLACE = Placement(Role.ACTOR_INFER, pool="one", replaceable=True)


@pytest.fixture(scope="module")
def oracle(manager: ResourceManager) -> Any:
    return manager.start(Oracle, PLACE)


@dataclass
class Counted:
    """An actor whose calls of Ray are counted, by their kind."""

    actor: RayActor
    member: Member
    sent: Counter[str] = field(default_factory=Counter)
    on_recover: Callable[[], object] = lambda: None

    def exchange(self, caller: str, calls: Sequence[SentCall]) -> tuple[Any, Any]:
        self.sent["exchange"] += 1
        return self.actor.exchange(caller, calls)

    def begin(self, caller: str, calls: Sequence[SentCall]) -> Any:
        self.sent["begin"] += 1
        return self.actor.begin(caller, calls)

    def recover(self, caller: str) -> Any:
        self.sent["recover"] += 1
        ref = self.actor.recover(caller)
        self.on_recover()
        return ref


@dataclass
class Asker:
    """Asks the worker of a cluster as the cluster does, on one event loop, and counts."""

    actor: Counted
    calls: BundledCalls

    @classmethod
    def of(cls, cluster: RayCluster[Any]) -> Asker:
        [actor] = cluster._actors
        counted = Counted(actor, actor.member)
        return cls(counted, BundledCalls(counted, cluster._watchdog))

    async def ask(self, method: Callable[..., Any], *args: Any) -> Any:
        return await self.calls.ask(method.__name__, Call(args, {}), None)


def test_each_caller_gets_its_own_answer_in_few_calls_of_ray(oracle: Any) -> None:
    async def ask() -> None:
        asker = Asker.of(oracle)
        waits = [0.1 * ((7 * i) % 5) for i in range(MANY)]
        doubled = await asyncio.gather(
            *(asker.ask(Oracle.double, i, wait) for i, wait in enumerate(waits))
        )
        assert doubled == [2 * i for i in range(MANY)]
        assert asker.actor.sent.total() < MANY / 10
        asker.actor.sent.clear()
        await asyncio.sleep(0.05)  # until the last bundle has ended
        assert await asker.ask(Oracle.double, 4, 0.0) == 8
        assert asker.actor.sent == {"exchange": 1}

    asyncio.run(ask())


def test_two_event_loops_ask_at_the_same_time(oracle: Any) -> None:
    found: dict[int, list[int]] = {}

    async def ask(first: int) -> None:
        calls = [oracle.ask(0, Oracle.double, first + i, 0.01 * (i % 3)) for i in range(50)]
        found[first] = await asyncio.gather(*calls)

    threads = [threading.Thread(target=asyncio.run, args=(ask(i),)) for i in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert found == {i: [2 * (i + j) for j in range(50)] for i in (0, 1000)}


def test_only_the_call_fails_that_fails(oracle: Any) -> None:
    async def ask() -> list[Any]:
        asker = Asker.of(oracle)
        results = await asyncio.gather(
            asker.ask(Oracle.double, 1, 0.2),
            asker.ask(Oracle.fail, "user"),
            asker.ask(Oracle.fail, "bug"),
            asker.ask(Oracle.fail, "odd"),
            asker.ask(Oracle.fail, "exit"),
            asker.ask(Oracle.unsendable),
            asker.ask(Oracle.double, threading.Lock(), 0.0),
            asker.ask(Oracle.double, 2, 0.0),
            return_exceptions=True,
        )
        assert asker.actor.sent["recover"] == 1
        assert await asker.ask(Oracle.double, 3, 0.0) == 6
        return results

    one, user, bug, odd, left, result, argument, two = asyncio.run(ask())
    assert (one, two) == (2, 4)
    assert isinstance(user, DataError)
    assert "raised by actor_infer[0].fail" in user.__notes__[0]
    assert "small_workers.py" in user.__notes__[0]
    for error, says in [
        (bug, "actor_infer[0].fail raised ValueError: bad luck"),
        (odd, "actor_infer[0].fail raised OddError: no such thing in here"),
        (left, "actor_infer[0].fail raised SystemExit: 3"),
        (result, "actor_infer[0].unsendable raised TypeError: its result cannot be sent"),
    ]:
        assert isinstance(error, WorkerError)
        assert str(error).startswith(says)
    assert isinstance(argument, TypeError)


def test_a_call_that_begins_while_answers_are_recovered_is_answered(oracle: Any) -> None:
    async def ask() -> int:
        asker, late = Asker.of(oracle), []

        def begin() -> None:
            late.append(asyncio.ensure_future(asker.ask(Oracle.double, 5, 0.1)))

        asker.actor.on_recover = begin
        with pytest.raises(WorkerError, match="its result cannot be sent"):
            await asker.ask(Oracle.unsendable)
        answer: int = await late[0]
        return answer

    assert asyncio.run(ask()) == 10


def test_a_caller_that_waits_no_more_disturbs_nobody(oracle: Any) -> None:
    async def ask() -> list[int]:
        given_up = [asyncio.ensure_future(oracle.ask(0, Oracle.double, i, 0.3)) for i in range(9)]
        unsent = asyncio.ensure_future(oracle.ask(0, Oracle.double, 0, 60.0))
        await asyncio.sleep(0)
        unsent.cancel()
        await asyncio.sleep(0.1)
        for one in given_up:
            one.cancel()
        first = await oracle.ask(0, Oracle.double, 5, 0.0)
        await asyncio.sleep(0.5)
        return [first, await oracle.ask(0, Oracle.double, 6, 0.0)]

    assert asyncio.run(ask()) == [10, 12]


class Dead:
    """A watchdog that has found every worker dead."""

    def guard(self, *_: object) -> None: ...

    def release(self, *_: object) -> None: ...

    def check(self, members: Sequence[Any]) -> None:
        raise WorkerLostError("it died", Role.ENVIRONMENT, "x", 0)


def test_a_caller_that_is_cancelled_when_the_worker_dies_is_cancelled() -> None:
    """Else a cancelled episode would take it for a failure of its environment, and go on."""

    async def ask(*, cancels: bool) -> None:
        actor = SimpleNamespace(member=None, exchange=lambda *_: (None, None))
        calls = BundledCalls(cast(Any, actor), cast(Any, Dead()))
        calls._collecting = True
        answer = asyncio.ensure_future(calls.ask("double", Call((), {}), None))
        await asyncio.sleep(0)
        [asked] = calls._asked.values()
        asked.answer.cancel()  # as the watchdog does
        if cancels:
            answer.cancel()
        await answer

    with pytest.raises(WorkerLostError):
        asyncio.run(ask(cancels=False))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ask(cancels=True))


def test_large_parts_of_many_answers_stay_in_the_store(oracle: Any) -> None:
    """Each caller reads its own tokens; no bundle keeps much more alive than they need."""
    size = STORED_BYTES // 40

    async def ask() -> list[Any]:
        answers = await asyncio.gather(*(oracle.ask(0, Oracle.write, (size, i)) for i in range(20)))
        return [one for pair in answers for one in pair]

    found = asyncio.run(ask())
    assert all(isinstance(one.content, RemoteValue) for one in found)
    written = contents_here([one.content for one in found])
    assert [len(one.tokens) for one in written] == [n for i in range(20) for n in (size, i)]
    assert all(one.tokens.tolist() == list(range(len(one.tokens))) for one in written)
    objects = Counter(one.content.content for one in found)
    assert len(objects) >= 20 * 8 * size / STORED_BYTES / 2


class Big:
    """An answer that is large."""


def test_a_worker_lets_go_of_answers_that_nobody_missed() -> None:
    async def make(call: SentCall) -> tuple[Big, None]:
        return Big(), None

    async def ask() -> None:
        host = BundleHost(make, kept_s=0.2)
        host.begin("me", [SentCall(7, "make", (), {})])
        bundle, _ = await host.collect("me")
        sent = weakref.ref(bundle.answers[0].value)
        del bundle
        assert host.recover("me") == {7}, "a bundle that did not arrive is there again"
        await host.collect("me")
        assert sent() is not None
        await asyncio.sleep(0.4)
        assert sent() is None
        assert host.recover("me") == set()

    asyncio.run(ask())


def test_calls_under_way_end_with_their_worker(manager: ResourceManager) -> None:
    cluster = manager.start(Oracle, PLACE)

    async def ask() -> list[Any]:
        waiting = [asyncio.ensure_future(cluster.ask(0, Oracle.double, i, 60.0)) for i in range(30)]
        await asyncio.sleep(0.2)
        waiting += [
            asyncio.ensure_future(cluster.ask(0, Oracle.double, i, 60.0)) for i in range(30)
        ]
        os.kill(await cluster.ask(0, Oracle.process), signal.SIGKILL)
        late = cluster.ask(0, Oracle.double, 1, 0.0)
        return await asyncio.gather(*waiting, late, return_exceptions=True)

    found = asyncio.run(asyncio.wait_for(ask(), 30))
    assert all(isinstance(one, WorkerLostError) for one in found)
    cluster.restart(0)
    assert asyncio.run(cluster.ask(0, Oracle.double, 4, 0.0)) == 8
    cluster.close()
