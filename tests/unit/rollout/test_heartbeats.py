"""What heartbeats bring and what they miss: pieces that get lost, errors, progress, its absence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.clock import run_virtually
from roll.config.sections.rollout import HealthConfig
from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineError, WaitTimeoutError, WorkerError
from roll.core.types import Heartbeat, Piece
from roll.rollout.fleet.pace import FleetSpeeds, Work
from roll.rollout.fleet.partial_completions import KnownTokens
from roll.rollout.fleet.replica import Replica
from roll.rollout.fleet.vitals import Vitals
from tests.unit.rollout.test_fleet import (
    Writer,
    answer,
    counts_up,
    finish,
    fleet_of,
    request,
    turns,
    watched,
)


def piece(start: int, end: int, finish: FinishReason = FinishReason.ABORT) -> Piece:
    """Of a continuation whose token i is i."""
    tokens = tuple(range(start, end))
    return Piece(start, Completion.of(tokens, tuple(map(float, tokens)), tokens, finish))


@given(
    stretches=st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), max_size=12),
    finish=st.sampled_from(FinishReason),
)
def test_whatever_heartbeats_are_lost_or_told_twice_the_beginning_is_known_without_a_gap(
    stretches: list[tuple[int, bool, bool]], finish: FinishReason
) -> None:
    heard, start, known, complete = KnownTokens(), 0, 0, True
    for number, (length, lost, again) in enumerate(stretches):
        last = number == len(stretches) - 1
        news = piece(start, start + length, finish if last else FinishReason.ABORT)
        start += length
        if not lost:
            for _ in range(1 + again):
                heard.add(news)
        complete = complete and (not lost or length == 0)
        known = start if complete else known
    found = heard.so_far()
    assert list(found.tokens) == list(found.versions) == list(range(known))
    assert list(found.logprobs) == list(map(float, range(known)))
    if found.finish is not FinishReason.ABORT:
        assert found.finish is finish
        assert known == start


def test_of_a_piece_that_is_known_in_part_the_rest_is_taken() -> None:
    heard = KnownTokens()
    for news in (piece(0, 4), piece(2, 7), piece(1, 3)):
        heard.add(news)
    assert list(heard.so_far().tokens) == list(range(7))


def test_a_sample_goes_on_without_a_gap_after_a_lost_heartbeat_and_a_lost_replica() -> None:
    first, second = Writer(), Writer()
    fleet = fleet_of(first, second)

    async def lose_a_beat_and_then_the_replica() -> list[Completion]:
        running = asyncio.create_task(answer(fleet, request()))
        await turns(10)
        fleet.replicas[0].note(await first.heartbeat())
        heard = first.written
        await turns(10)
        await first.heartbeat()  # nobody hears it
        await turns(10)
        fleet.replicas[0].note(await first.heartbeat())
        first.dead = True
        done = await running
        assert sum(len(one.prompt_tokens) - 3 for one in second.asked) == heard
        return done

    assert counts_up(finish(lose_a_beat_and_then_the_replica()), 2)


@dataclass
class Stumbles(Writer):
    """Heartbeats number `first` to `last` end with an error."""

    first: int = 0
    last: int = 0
    beats: int = 0

    async def heartbeat(self) -> Heartbeat:
        self.beats += 1
        if self.first <= self.beats <= self.last:
            raise RuntimeError("an answer that nobody can unpickle")
        return await super().heartbeat()


@dataclass
class Fails(Writer):
    """Every heartbeat ends with this error."""

    error: Exception = field(default_factory=lambda: RuntimeError("none given"))

    async def heartbeat(self) -> Heartbeat:
        raise self.error


LIMITS = HealthConfig(heartbeat_s=1, timeout_s=10, restart_timeout_s=5)


def virtually(main: Callable[[], Any]) -> Any:
    async def alone() -> Any:
        return await asyncio.wait_for(main(), 10_000)

    return run_virtually(alone())


def test_one_unexpected_error_of_a_heartbeat_costs_nothing_and_a_later_hang_is_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> list[Completion]:
        first = Stumbles(first=2, last=3, turn=lambda: asyncio.sleep(1))
        fleet = fleet_of(first, Writer())
        health = watched(fleet, limits=LIMITS)
        health.start()
        running = asyncio.create_task(answer(fleet, request()))
        await asyncio.sleep(20)
        assert fleet.replicas[0].engine is first
        assert first.beats > 10
        first.frozen = True
        done = await running
        await health.close()
        assert fleet.replicas[0].engine is not first
        return done

    assert counts_up(virtually(main), 2)
    assert "replica 0: its heartbeats fail: RuntimeError: an answer that nobody" in caplog.text
    assert "gave no heartbeat for 10 s" in caplog.text


@dataclass
class Slow(Writer):
    """Its first heartbeat takes 35 s, such as on a machine with too much work."""

    answered: bool = False

    async def heartbeat(self) -> Heartbeat:
        if not self.answered:
            await asyncio.sleep(35)
        self.answered = True
        return await super().heartbeat()


def test_a_new_engine_gets_more_time_than_the_one_that_was_too_slow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> int:
        fleet, engines = fleet_of(Slow()), 0

        async def renew(replica: Replica) -> None:
            nonlocal engines
            engines += 1
            replica.engine = Slow(version=fleet.version)

        health = watched(fleet, limits=LIMITS, restart=renew)
        health.start()
        await asyncio.sleep(1000)
        await health.close()
        assert fleet.replicas[0].vitals.last_heartbeat_s is not None
        return engines

    assert virtually(main) == 2
    assert "gave no heartbeat for 20 s (health.timeout_s" in caplog.text


def test_errors_that_say_all_have_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        replica = fleet_of(Fails(error=WorkerError("Ray's raylet died"))).replicas[0]
        assert await replica.listen(1) is None

    virtually(main)
    assert "its heartbeats fail: WorkerError: Ray's raylet died" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_replica_that_answers_with_errors_alone_is_given_up_in_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        first = Stumbles(first=2, last=10**6)
        fleet = fleet_of(first, Writer())
        health = watched(fleet, limits=LIMITS)
        health.start()
        while fleet.replicas[0].engine is first:
            await asyncio.sleep(0.5)
        await health.close()
        return loop.time()

    assert virtually(main) == pytest.approx(2 + 10, abs=2)


def test_an_error_in_the_watch_itself_ends_the_run_and_is_named() -> None:
    class Unmeasured(Replica):
        @property
        def work(self) -> Work:
            raise ZeroDivisionError("a bug")

    async def main() -> None:
        fleet = fleet_of(Writer())
        fleet.replicas = [Unmeasured(0, Writer())]
        health = watched(fleet, limits=LIMITS)
        health.start()
        await asyncio.sleep(3)
        with pytest.raises(EngineError, match="heartbeat of replica 0 ended: ZeroDivisionError"):
            await answer(fleet, request())
        await health.close()

    virtually(main)


def beating(fleet: Any) -> asyncio.Task[None]:
    """Heartbeats of all replicas, once a second."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(1)
            for replica in fleet.replicas:
                await replica.listen(10)

    return asyncio.ensure_future(beat())


def test_a_request_may_take_as_long_as_it_will_while_its_tokens_come() -> None:
    async def main() -> list[Completion]:
        writer = Writer(turn=lambda: asyncio.sleep(20))
        fleet = fleet_of(writer)
        beats = beating(fleet)
        done = await fleet.generate(request(), session="r", timeout_s=30)
        assert asyncio.get_running_loop().time() > 900
        beats.cancel()
        return done

    assert counts_up(virtually(main), 2)


def test_a_request_that_waits_behind_others_on_its_replica_is_not_overdue() -> None:
    @dataclass
    class OneAtATime(Writer):
        async def generate(self, request: Any) -> list[Completion]:
            while self.running:
                await asyncio.sleep(1)
            return await super().generate(request)

    async def main() -> None:
        fleet = fleet_of(OneAtATime(turn=lambda: asyncio.sleep(5)))
        beats = beating(fleet)
        both = [fleet.generate(request(name), session=name, timeout_s=30) for name in "ab"]
        for done in await asyncio.gather(*both):
            assert counts_up(done, 2)
        beats.cancel()

    virtually(main)


def test_prefill_and_new_weights_count_as_progress_of_a_request() -> None:
    @dataclass
    class Reads(Writer):
        read: int = 0

        async def heartbeat(self) -> Heartbeat:
            self.read += 100
            return Heartbeat(0, 0, min(self.read, 5000), {})

    async def main() -> float:
        engine = Reads(turn=lambda: asyncio.sleep(10**6))
        fleet = fleet_of(engine)
        beats = beating(fleet)
        running = asyncio.create_task(fleet.generate(request(), session="r", timeout_s=30))
        await asyncio.sleep(40)  # it reads for 50 s
        fleet.replicas[0].loading = True
        await asyncio.sleep(100)
        fleet.replicas[0].loading = False
        with pytest.raises(WaitTimeoutError, match="made no progress for 30 s"):
            await running
        beats.cancel()
        return asyncio.get_running_loop().time()

    assert virtually(main) == pytest.approx(140 + 30, abs=35)


def test_what_is_usual_is_learned_from_who_writes_and_from_who_reads() -> None:
    pace = FleetSpeeds()
    writes = Work(written_tokens=400, prefilled_tokens=0, busy_s=10, sequence_s=40)
    reads = Work(written_tokens=0, prefilled_tokens=9000, busy_s=10, sequence_s=40)
    for index in range(3):
        pace.note(index, writes, pace.usual(0, 0))
    usual = pace.usual(0, 0)
    assert (usual.each, usual.whole, usual.prefill) == (10, 40, 0)
    assert usual.share(writes) == 1
    assert usual.share(reads) > 1  # nothing is known of reading, but that it is no slower
    for index in range(3):
        pace.note(index, reads, usual)
    usual = pace.usual(0, 0)
    assert (usual.each, usual.prefill) == (10, 900)
    assert usual.share(reads) == 1
    assert usual.share(Work(40, 0, 10, 40)) == pytest.approx(0.1)
    assert usual.share(Work(40, 450, 10, 40)) == pytest.approx(0.1 + 0.05)
    # Ten times as many sequences, each ten times slower: the replica as a whole is as fast.
    assert usual.share(Work(400, 0, 10, 400)) == 1


def test_two_replicas_are_too_few_to_say_what_is_usual() -> None:
    pace = FleetSpeeds()
    for index in range(2):
        pace.note(index, Work(400, 0, 10, 40), pace.usual(0, 0))
    assert not pace.usual(0, 0).known
    pace.note(2, Work(400, 0, 10, 40), pace.usual(0, 0))
    assert pace.usual(0, 0).known
    pace.forget(2)
    assert not pace.usual(0, 0).known


def test_the_time_of_a_new_engine_does_not_grow_for_ever() -> None:
    assert [Vitals(restarts=each).limit_s(10) for each in (0, 1, 3, 40)] == [10, 20, 80, 80]
    assert Vitals(restarts=40, last_heartbeat_s=1.0).limit_s(10) == 10
