"""The fleet over engines that crash, hang, crawl and come back: nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.sections.roles import Role
from roll.config.sections.rollout import HealthConfig
from roll.core.completion import Completion, FinishReason
from roll.core.errors import (
    EngineDiedError,
    EngineError,
    IncompleteWeightsError,
    WaitTimeoutError,
    WorkerLostError,
)
from roll.core.types import GenerateRequest, Heartbeat, Piece, SamplingParams
from roll.rollout.fleet.fleet import MAX_MOVES, Fleet
from roll.rollout.fleet.health import Health
from roll.rollout.fleet.partial_completions import continuable_part, remaining_request
from roll.rollout.fleet.replica import Replica, State

T = TypeVar("T")
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=50)


@dataclass
class Writer:
    """An engine that writes the numbers from the prompt's length on, one per sibling and turn.

    So a finished sibling is right if and only if its tokens count up without gap or repeat. As the
    real ones do, it raises on torn weights, until a push has brought whole ones (`load`).
    """

    version: int = 0
    running: dict[str, list[list[int]]] = field(default_factory=dict)
    asked: list[GenerateRequest] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    reported: dict[str, list[int]] = field(default_factory=dict)
    dead: bool = False
    frozen: bool = False
    weights_incomplete: bool = False
    written: int = 0
    turn: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        assert request.id not in self.running
        self._require_whole_weights()
        self.asked.append(request)
        tokens = self.running[request.id] = [[] for _ in range(request.n)]
        self.reported[request.id] = [0] * request.n
        start = len(request.prompt_tokens)
        try:
            while any(len(one) < request.sampling.max_new_tokens for one in tokens):
                await self.turn()
                while self.frozen and not self.dead:
                    await asyncio.sleep(0.001)
                if self.dead:
                    raise EngineDiedError("the engine's process is gone")
                self._require_whole_weights()
                if request.id in self.aborted:
                    break
                for i, one in enumerate(tokens):
                    # Siblings end at different lengths.
                    if len(one) < request.sampling.max_new_tokens - (i if start < 10 else 0):
                        one.append(start + len(one))
                        self.written += 1
                if all(self._ended(request, i, one) for i, one in enumerate(tokens)):
                    break
            return [self._completion(request, i, one) for i, one in enumerate(tokens)]
        finally:
            del self.running[request.id]

    def load(self, version: int) -> None:
        self.version, self.weights_incomplete = version, False

    def _require_whole_weights(self) -> None:
        if self.weights_incomplete:
            raise IncompleteWeightsError("the engine has incomplete weights")

    def _ended(self, request: GenerateRequest, i: int, tokens: list[int]) -> bool:
        early = i if len(request.prompt_tokens) < 10 else 0
        return len(tokens) >= request.sampling.max_new_tokens - early

    def _completion(
        self, request: GenerateRequest, i: int, tokens: list[int], start: int = 0
    ) -> Completion:
        finish = FinishReason.STOP if self._ended(request, i, tokens) else FinishReason.ABORT
        news = tuple(tokens[start:])
        return Completion.of(news, (-0.5,) * len(news), (self.version,) * len(news), finish)

    async def abort(self, request_id: str) -> None:
        if self.dead:
            raise EngineDiedError("the engine's process is gone")
        self.aborted.add(request_id)

    async def heartbeat(self) -> Heartbeat:
        while self.frozen and not self.dead:
            await asyncio.sleep(0.001)
        if self.dead:
            raise WorkerLostError("worker died", role=Role.ACTOR_INFER, label="", rank=0)
        progress = {}
        for name, tokens in self.running.items():
            request = next(one for one in self.asked if one.id == name)
            marks = self.reported[name]
            progress[name] = tuple(
                Piece(marks[i], self._completion(request, i, one, marks[i]))
                for i, one in enumerate(tokens)
            )
            self.reported[name] = [len(one) for one in tokens]
        return Heartbeat(self.version, self.written, 0, progress)


def fleet_of(*writers: Writer, capacity: int = 4, **options: Any) -> Fleet:
    replicas = [Replica(i, w, capacity, abort_timeout_s=5) for i, w in enumerate(writers)]
    return Fleet(replicas, **options)


def request(name: str = "r", *, n: int = 2, prompt: int = 3, seed: int | None = 7) -> Any:
    return GenerateRequest(name, tuple(range(prompt)), SAMPLING, n=n, seed=seed)


def counts_up(done: Sequence[Completion], n: int, prompt: int = 3) -> bool:
    """Every sibling is there, once, whole."""
    return len(done) == n and all(
        list(one.tokens) == list(range(prompt, prompt + len(one)))
        and len(one) >= SAMPLING.max_new_tokens - n
        and one.finish is not FinishReason.ABORT
        for one in done
    )


def finish(work: Any) -> Any:
    async def alone() -> Any:
        try:
            return await asyncio.wait_for(work, 20)
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"still running: {left}"

    return asyncio.run(alone())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def answer(fleet: Fleet, one: GenerateRequest) -> list[Completion]:
    return await fleet.generate(one, session=one.id, timeout_s=20)


def test_a_request_whose_replica_dies_is_finished_by_another_from_what_was_heard() -> None:
    first, second = Writer(), Writer()
    fleet = fleet_of(first, second)

    async def die_half_way() -> list[Completion]:
        running = asyncio.create_task(answer(fleet, request()))
        await turns(10)
        fleet.replicas[0].note(await first.heartbeat())
        heard = first.written
        await turns(4)
        first.dead = True
        done = await running
        assert sum(len(one.prompt_tokens) - 3 for one in second.asked) == heard
        return done

    assert counts_up(finish(die_half_way()), 2)
    assert fleet.replicas[0].state is State.LOST
    assert [one.n for one in second.asked] == [1, 1]
    assert fleet.take_metrics().values_by_name()["rollout/lost_replicas"] == 1
    assert fleet.take_metrics().values_by_name()["rollout/lost_replicas"] == 0


def test_what_was_written_with_older_weights_is_written_again_unless_told_otherwise() -> None:
    first, second = Writer(), Writer(version=1)
    fleet = fleet_of(first, second, continue_in_flight=False)

    async def die_after_an_update() -> list[Completion]:
        running = asyncio.create_task(answer(fleet, request()))
        await turns(10)
        fleet.replicas[0].note(await first.heartbeat())
        fleet.version = 1
        first.dead = True
        return await running

    done = finish(die_after_an_update())
    assert counts_up(done, 2)
    assert {version for one in done for version in one.versions} == {1}


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_request_that_moved_before_a_push_starts_again_on_the_new_weights(goes_on: bool) -> None:
    writer = Writer()
    fleet = fleet_of(writer, continue_in_flight=False)

    async def push(indices: Sequence[int]) -> None:
        writer.load(1)

    async def train_between() -> list[Completion]:
        running = asyncio.create_task(answer(fleet, request()))
        await turns(10)
        await fleet.leave([0])
        if goes_on:  # what it wrote is a part of its prompt as the push comes
            fleet.join([0])
            await turns(10)
        await fleet.update_weights(1, push)
        fleet.join([0])
        return await running

    done = finish(train_between())
    assert counts_up(done, 2)
    assert {version for one in done for version in one.versions} == {1}
    replica = fleet.replicas[0]
    assert replica.requests == replica.in_flight_tokens == replica.in_flight_sequences == 0


def test_a_replica_that_leaves_in_the_moment_of_a_seat_does_not_get_the_request() -> None:
    writer = Writer()
    fleet = fleet_of(writer)

    async def give_and_leave() -> list[Completion]:
        await fleet.leave([0])
        running = asyncio.create_task(answer(fleet, request()))
        await turns(3)
        fleet.join([0])  # gives the seat
        await fleet.leave([0])
        await turns(5)
        assert not writer.asked
        assert fleet.replicas[0].in_flight_sequences == 0
        fleet.join([0])
        return await running

    assert counts_up(finish(give_and_leave()), 2)


def test_a_replica_that_leaves_hands_its_requests_over_with_all_they_have() -> None:
    first, second = Writer(), Writer()
    fleet = fleet_of(first, second)

    async def leave_half_way() -> list[Completion]:
        running = asyncio.create_task(answer(fleet, request()))
        await turns(12)
        await fleet.leave([0])
        assert first.running == {}
        assert fleet.replicas[0].state is State.AWAY
        return await running

    assert counts_up(finish(leave_half_way()), 2)
    assert all(len(one.prompt_tokens) > 10 for one in second.asked)


def test_while_nobody_serves_requests_wait_and_go_on_when_somebody_joins() -> None:
    writer = Writer()
    fleet = fleet_of(writer)

    async def leave_and_join() -> list[Completion]:
        running = asyncio.create_task(answer(fleet, request()))
        await turns(5)
        await fleet.leave([0])
        await turns(20)
        assert not running.done()
        assert writer.running == {}
        fleet.join([0])
        return await running

    assert counts_up(finish(leave_and_join()), 2)


def test_new_weights_go_to_one_busy_replica_after_the_other() -> None:
    fleet = fleet_of(Writer(), Writer())
    pushed: list[list[int]] = []

    async def update() -> None:
        running = [asyncio.create_task(answer(fleet, request(f"r{i}"))) for i in range(4)]
        await turns(5)

        async def push(indices: Sequence[int]) -> None:
            pushed.append(list(indices))
            assert all(fleet.replicas[i].loading for i in indices)

        await fleet.update_weights(1, push)
        await asyncio.gather(*running)
        await fleet.update_weights(2, push)

    finish(update())
    assert [one for one in pushed if one] == [[0], [1], [0, 1]]
    assert fleet.version == 2


def test_requests_that_must_not_outlive_their_weights_start_again_on_the_new_ones() -> None:
    writer = Writer()
    fleet = fleet_of(writer, continue_in_flight=False)

    async def update() -> list[Completion]:
        running = asyncio.create_task(answer(fleet, request()))
        await turns(10)

        async def push(indices: Sequence[int]) -> None:
            assert writer.running == {}
            writer.version = 1
            await turns(5)
            assert writer.running == {}

        await fleet.update_weights(1, push)
        return await running

    done = finish(update())
    assert counts_up(done, 2)
    assert {version for one in done for version in one.versions} == {1}


def test_a_replica_that_dies_under_a_push_does_not_stop_the_others() -> None:
    first, second = Writer(), Writer()
    fleet = fleet_of(first, second)
    pushed: list[list[int]] = []

    async def push(indices: Sequence[int]) -> None:
        pushed.append(list(indices))
        if 0 in indices:
            fleet.replicas[0].lose("died under the push")
            raise EngineError("the push broke")

    finish(fleet.update_weights(1, push))
    assert pushed == [[0, 1], [1]]


def test_a_push_that_fails_by_itself_is_an_error() -> None:
    async def push(indices: Sequence[int]) -> None:
        raise EngineError("a name is missing")

    with pytest.raises(EngineError, match="a name is missing"):
        finish(fleet_of(Writer()).update_weights(1, push))


def test_a_replica_that_hangs_is_lost_before_a_push_and_does_not_hold_it_up() -> None:
    first, second = Writer(frozen=True), Writer()
    fleet = fleet_of(first, second, answer_s=0.05)
    pushed: list[list[int]] = []

    async def push(indices: Sequence[int]) -> None:
        pushed.append(list(indices))

    finish(fleet.update_weights(1, push))
    assert pushed == [[1]]
    assert fleet.replicas[0].gone


def test_a_death_that_only_broke_the_push_is_found_by_asking() -> None:
    first, second = Writer(), Writer()
    fleet = fleet_of(first, second)
    pushed: list[list[int]] = []

    async def push(indices: Sequence[int]) -> None:
        pushed.append(list(indices))
        if 0 in indices:
            first.dead = True
            raise EngineError("the push broke")

    finish(fleet.update_weights(1, push))
    assert pushed == [[0, 1], [1]]


def test_when_the_last_replica_is_lost_everybody_hears_why() -> None:
    writer = Writer()
    fleet = fleet_of(writer, capacity=2)

    async def die() -> list[Any]:
        running = [asyncio.create_task(answer(fleet, request(f"r{i}"))) for i in range(3)]
        await turns(5)
        writer.dead = True
        return await asyncio.gather(*running, return_exceptions=True)

    errors = finish(die())
    assert [type(error) for error in errors] == [EngineError] * 3
    assert all("the last inference replica is lost" in str(error) for error in errors)


def test_an_error_of_one_request_does_not_cost_the_replica() -> None:
    class Refuses(Writer):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            raise EngineError("the prompt is too long")

    fleet = fleet_of(Refuses())
    with pytest.raises(EngineError, match="too long"):
        finish(answer(fleet, request()))
    assert fleet.replicas[0].serving


def test_no_replica_gets_more_than_it_has_room_for_and_the_first_come_are_first() -> None:
    writer = Writer()
    fleet = fleet_of(writer, capacity=4)

    async def many() -> None:
        running = [asyncio.create_task(answer(fleet, request(f"r{i}"))) for i in range(9)]
        while not all(task.done() for task in running):
            assert len(writer.running) <= 2
            await asyncio.sleep(0)

    finish(many())
    assert [one.id for one in writer.asked] == [f"r{i}" for i in range(9)]


def test_a_sibling_goes_on_with_other_random_numbers_and_what_it_lacks() -> None:
    written = Completion.of((3, 4), (-0.5, -0.5), (0, 0), FinishReason.ABORT)
    rest = remaining_request(request(n=3), 1, written)
    assert (rest.prompt_tokens, rest.sampling.max_new_tokens, rest.n) == ((0, 1, 2, 3, 4), 48, 1)
    assert rest.seed not in (7, 8)
    nothing = written.part(0, 0)
    assert remaining_request(request(n=3), 1, nothing).seed == 8


def test_a_stop_string_cannot_hide_in_the_seam() -> None:
    tokens = tuple(range(20))
    written = Completion.of(tokens, (0.0,) * 20, (0,) * 20, FinishReason.ABORT)
    sampling = replace(SAMPLING, stop=("ab", "c"))
    again = replace(sampling, temperature=0.0)
    assert continuable_part(written, again) == written.part(0, 12), "the same will be written"
    assert continuable_part(written, sampling) == written.part(0, 0), "their text is not known"
    ended = replace(written, finish=FinishReason.STOP)
    assert continuable_part(ended, replace(SAMPLING, stop=("ab",))) == ended
    assert (
        continuable_part(written, replace(SAMPLING, max_new_tokens=20)).finish
        is FinishReason.LENGTH
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("xyzw********", "xyzw"),
        ("xyz\n********", "xyz"),
        ("xa\n\n********", "x"),  # `a` begins a stop string as well
        ("\n\n\n\n********", ""),
        ("xyz\N{REPLACEMENT CHARACTER}********", "xyz"),
        ("x" * 100 + "--********", "x" * 100 + "--"),  # special tokens: no text
        ("x" * 100 + "\n" + "-" * 50 + "********", "x" * 100),
    ],
)
def test_what_is_kept_does_not_end_with_the_beginning_of_a_stop_string(
    text: str, kept: str
) -> None:
    tokens = [ord(one) for one in text]
    written = Completion.of(tokens, [0.0] * len(tokens), [0] * len(tokens), FinishReason.ABORT)

    def decode(some: Sequence[int]) -> str:
        return "".join(map(chr, some)).replace("-", "")

    sampling = replace(SAMPLING, stop=("\n\n", "ab"), max_new_tokens=500)
    found = continuable_part(written, sampling, decode)
    assert "".join(map(chr, found.tokens)) == kept


def test_penalties_that_no_prompt_counts_for_begin_anew() -> None:
    written = Completion.of((3, 4), (0.0, 0.0), (0, 0), FinishReason.ABORT)
    assert len(continuable_part(written, replace(SAMPLING, presence_penalty=0.5))) == 0
    assert len(continuable_part(written, replace(SAMPLING, frequency_penalty=0.5))) == 0
    assert continuable_part(written, replace(SAMPLING, repetition_penalty=1.5)) == written


LIMITS = HealthConfig(heartbeat_s=0.002, timeout_s=0.05, restart_timeout_s=5, slow_factor=0)


def watched(
    fleet: Fleet,
    restart: Any = None,
    limits: HealthConfig = LIMITS,
    *,
    trainer_s: float = 0.0,
    retire: Any = None,
) -> Health:
    async def renew(replica: Replica) -> None:
        replica.engine = Writer(version=fleet.version)

    async def rejoin(replica: Replica) -> None:
        await asyncio.sleep(trainer_s)
        replica.reset_for_new_engine()
        replica.mark_weights_complete()
        fleet.join([replica.index])

    return Health(fleet, limits, restart or renew, rejoin, retire)


@pytest.mark.parametrize("how", ["dead", "frozen"])
def test_a_dead_or_stuck_engine_is_replaced_and_its_requests_end_elsewhere(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    slowly = lambda: asyncio.sleep(0.002)  # noqa: E731
    first, second = Writer(turn=slowly), Writer(turn=slowly)
    fleet = fleet_of(first, second)
    health = watched(fleet)

    async def break_one() -> list[list[Completion]]:
        health.start()
        running = [asyncio.create_task(answer(fleet, request(f"r{i}"))) for i in range(4)]
        while fleet.replicas[0].vitals.last_heartbeat_s is None:
            await asyncio.sleep(0.001)
        setattr(first, how, True)
        done = await asyncio.gather(*running)
        await asyncio.sleep(0.02)
        await health.close()
        return done

    assert all(counts_up(done, 2) for done in finish(break_one()))
    assert fleet.replicas[0].serving
    assert fleet.replicas[0].engine is not first
    assert "inference replica 0 is lost, its requests go to the others" in caplog.text
    assert "inference replica 0 is back" in caplog.text
    if how == "frozen":
        assert "gave no heartbeat for 0.05 s (health.timeout_s" in caplog.text


def test_requests_of_the_only_replica_wait_until_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    only = Writer(turn=lambda: asyncio.sleep(0.002))
    fleet = fleet_of(only)
    health = watched(fleet)

    async def break_it() -> list[Completion]:
        health.start()
        running = asyncio.create_task(answer(fleet, request("r0")))
        while fleet.replicas[0].vitals.last_heartbeat_s is None:
            await asyncio.sleep(0.001)
        only.frozen = True
        done = await running
        await health.close()
        return done

    assert counts_up(finish(break_it()), 2)
    assert "inference replica 0 is lost, its requests wait until a replica is back" in caplog.text


def test_a_replica_that_crawls_is_replaced() -> None:
    writers = [Writer(turn=lambda: asyncio.sleep(0.002)) for _ in range(3)]
    writers.append(Writer(turn=lambda: asyncio.sleep(0.1)))
    fleet = fleet_of(*writers, capacity=2)
    health = watched(fleet, limits=LIMITS.model_copy(update={"slow_factor": 0.2}))

    async def run() -> list[list[Completion]]:
        health.start()
        running = [asyncio.create_task(answer(fleet, request(f"r{i}"))) for i in range(12)]
        done = await asyncio.gather(*running)
        await health.close()
        return done

    assert all(counts_up(done, 2) for done in finish(run()))
    assert fleet.replicas[3].engine is not writers[3]
    assert [r.engine for r in fleet.replicas[:3]] == writers[:3]


def test_a_replica_that_is_lost_too_often_ends_the_run_when_it_is_the_last() -> None:
    writer = Writer()
    fleet = fleet_of(writer)

    async def renew(replica: Replica) -> None:
        replica.engine = Writer(dead=True)
        replica.reset_for_new_engine()
        replica.mark_weights_complete()
        fleet.join([replica.index])

    health = watched(fleet, renew, LIMITS.model_copy(update={"max_restarts": 2}))
    writer.dead = True

    async def run() -> list[Completion]:
        health.start()
        try:
            return await answer(fleet, request())
        finally:
            await health.close()

    with pytest.raises(EngineError, match="no inference replica is left: replica 0 was lost 3"):
        finish(run())


def test_a_replica_that_is_given_up_is_retired_and_the_others_go_on() -> None:
    async def cannot(replica: Replica) -> None:
        raise EngineError("no GPU answers")

    retired: list[int] = []

    async def retire(replica: Replica) -> None:
        retired.append(replica.index)

    fleet = fleet_of(Writer(dead=True), Writer())
    health = watched(fleet, cannot, LIMITS.model_copy(update={"max_restarts": 1}), retire=retire)

    async def run() -> list[Completion]:
        health.start()
        done = await answer(fleet, request())
        while not retired:
            await asyncio.sleep(0.001)
        await health.close()
        return done

    assert counts_up(finish(run()), 2)
    assert retired == [0]


def test_a_replica_that_cannot_be_retired_does_not_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def cannot(replica: Replica) -> None:
        raise EngineError("no GPU answers")

    async def retire(replica: Replica) -> None:
        raise RuntimeError("its node does not answer")

    fleet = fleet_of(Writer(dead=True), Writer())
    health = watched(fleet, cannot, LIMITS.model_copy(update={"max_restarts": 1}), retire=retire)

    async def run() -> list[Completion]:
        health.start()
        while "keeps its devices" not in caplog.text:
            await asyncio.sleep(0.001)
        done = await answer(fleet, request())
        await health.close()
        return done

    assert counts_up(finish(run()), 2)
    assert "replica 0 keeps its devices: its node does not answer" in caplog.text


def test_a_replica_that_is_given_up_is_not_the_last_while_another_is_revived() -> None:
    first, second = Writer(dead=True), Writer(dead=True)
    fleet = fleet_of(first, second)
    second_replica = fleet.replicas[1]
    given_up = asyncio.Event()

    async def restart(replica: Replica) -> None:
        if replica.index == 0:
            while not second_replica.gone:
                await asyncio.sleep(0.001)
            raise EngineError("no GPU answers")
        await given_up.wait()
        replica.engine = Writer(version=fleet.version)

    async def retire(replica: Replica) -> None:
        await turns(3)
        given_up.set()

    health = watched(fleet, restart, LIMITS.model_copy(update={"max_restarts": 1}), retire=retire)

    async def run() -> list[Completion]:
        health.start()
        done = await answer(fleet, request())
        await health.close()
        return done

    assert counts_up(finish(run()), 2)
    assert fleet.replicas[0].gone


def test_a_replica_that_is_lost_as_it_comes_back_is_revived_once() -> None:
    fleet = fleet_of(Writer())
    restarts: list[int] = []

    async def restart(replica: Replica) -> None:
        restarts.append(replica.index)
        replica.engine = Writer(version=fleet.version)

    async def rejoin(replica: Replica) -> None:
        replica.reset_for_new_engine()
        replica.mark_weights_complete()
        fleet.join([0])
        if len(restarts) == 1:  # as by an engine that dies under a push
            replica.lose("it died at its first request")
            await turns(20)
            raise EngineError("the push broke")

    health = Health(fleet, LIMITS, restart, rejoin)

    async def run() -> list[Completion]:
        health.start()
        fleet.replicas[0].lose("dead")
        done = await answer(fleet, request())
        await turns(50)
        await health.close()
        return done

    assert counts_up(finish(run()), 2)
    assert restarts == [0, 0]


def test_a_revival_that_fails_is_told_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def cannot(replica: Replica) -> None:
        raise EngineError("no GPU answers")

    first = Writer()
    fleet = fleet_of(first, Writer())
    health = watched(fleet, cannot)

    async def run() -> list[Completion]:
        health.start()
        running = asyncio.create_task(answer(fleet, request()))
        await turns(3)
        first.dead = True
        done = await running
        await health.close()
        return done

    assert counts_up(finish(run()), 2)
    assert "replica 0 could not be restarted: EngineError: no GPU answers" in caplog.text


def test_a_restart_that_fails_is_tried_again_after_a_pause_that_grows() -> None:
    first = Writer(dead=True)
    fleet = fleet_of(first)
    tries: list[float] = []

    async def third_time(replica: Replica) -> None:
        tries.append(asyncio.get_running_loop().time())
        if len(tries) < 3:
            raise EngineError("no GPU answers")
        replica.engine = Writer(version=fleet.version)

    health = watched(fleet, third_time)

    async def run() -> list[Completion]:
        health.start()
        done = await answer(fleet, request())
        await health.close()
        return done

    assert counts_up(finish(run()), 2)
    first_pause_s, second_pause_s = (after - before for before, after in pairwise(tries))
    assert first_pause_s >= 10 * LIMITS.heartbeat_s
    assert second_pause_s >= 20 * LIMITS.heartbeat_s


def test_a_new_engine_may_wait_for_its_weights_longer_than_it_may_take_to_start() -> None:
    first = Writer(dead=True)
    fleet = fleet_of(first)
    health = watched(
        fleet, limits=LIMITS.model_copy(update={"restart_timeout_s": 0.05}), trainer_s=0.2
    )

    async def run() -> list[Completion]:
        health.start()
        done = await answer(fleet, request())
        await health.close()
        return done

    assert counts_up(finish(run()), 2)


def test_a_loading_replica_is_not_asked_for_heartbeats() -> None:
    writer = Writer(frozen=True)
    fleet = fleet_of(writer)
    health = watched(fleet)

    async def run() -> None:
        fleet.replicas[0].loading = True
        health.start()
        await asyncio.sleep(0.1)
        await health.close()

    finish(run())
    assert fleet.replicas[0].serving


def test_a_timeout_tells_when_the_replica_was_last_heard_of() -> None:
    writer = Writer(turn=lambda: asyncio.sleep(0.01))
    fleet = fleet_of(writer)

    async def run() -> None:
        fleet.replicas[0].note(Heartbeat(0, 12, 0, {}))
        await fleet.generate(request(), session="r", timeout_s=0.05)

    with pytest.raises(WaitTimeoutError, match=r"last heartbeat 0\.\d s ago, 12 tokens written"):
        finish(run())


@given(
    seed=st.integers(0, 10_000),
    num_replicas=st.integers(1, 4),
    num_requests=st.integers(1, 10),
    continue_in_flight=st.booleans(),
)
@settings(max_examples=60)
def test_whatever_fails_every_sibling_ends_once_and_whole(
    seed: int, num_replicas: int, num_requests: int, continue_in_flight: bool
) -> None:
    chance = random.Random(seed)
    fleet = fleet_of(
        *(Writer() for _ in range(num_replicas)), continue_in_flight=continue_in_flight
    )
    version = 0

    def renew(replica: Replica) -> None:
        replica.engine = Writer(version=version)
        replica.reset_for_new_engine()
        replica.mark_weights_complete()
        fleet.join([replica.index])

    async def push(indices: Sequence[int]) -> None:
        breaks = len(indices) > 1 and chance.random() < 0.3
        for index in indices:
            await turns(chance.randrange(4))
            writer = fleet.replicas[index].engine
            assert isinstance(writer, Writer)
            writer.load(version)
            writer.weights_incomplete = breaks
        if breaks:
            await turns(chance.randrange(20))
            assert isinstance(writer, Writer)
            writer.dead = True
            raise EngineError("a receiver died")

    async def trouble(running: Sequence[asyncio.Task[Any]]) -> None:
        nonlocal version
        away: set[int] = set()
        moves = 0  # a request that must move more often is given up, which is another test's matter
        while not all(task.done() for task in running):
            await turns(chance.randrange(30))
            replica = chance.choice(fleet.replicas)
            what = chance.choice(["crash", "lose", "leave", "join", "update", "heartbeat", "back"])
            if what in ("crash", "lose"):
                moves += 1
                if moves > MAX_MOVES:
                    continue
            if what == "crash" and isinstance(replica.engine, Writer):
                replica.engine.dead = True
            elif what == "lose":
                replica.lose("given up")
            elif what == "leave" and len(away) + 1 < num_replicas:
                away.add(replica.index)
                await fleet.leave([replica.index])
            elif what == "join":
                fleet.join([replica.index])
                away.discard(replica.index)
            elif what == "update":
                version += 1
                await fleet.update_weights(version, push)
            elif what == "heartbeat" and replica.serving:
                try:
                    replica.note(await replica.engine.heartbeat())
                except WorkerLostError as error:
                    replica.lose(str(error))
            if replica.state is State.LOST or what == "back":
                renew(replica)

    async def run() -> list[list[Completion]]:
        fleet.on_lost = lambda replica, reason: None
        running = [
            asyncio.create_task(answer(fleet, request(f"r{i}", n=1 + i % 3)))
            for i in range(num_requests)
        ]
        await asyncio.gather(trouble(running), *running)
        return [task.result() for task in running]

    done = finish(run())
    assert all(counts_up(one, 1 + i % 3) for i, one in enumerate(done))
    for replica in fleet.replicas:
        assert replica.requests == replica.in_flight_tokens == replica.in_flight_sequences == 0


def test_the_last_loss_of_a_request_that_moves_for_ever_is_named() -> None:
    class AlwaysDies(Writer):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            raise EngineDiedError("the engine's process is gone")

    fleet = fleet_of(AlwaysDies())

    def come_back(replica: Replica) -> None:
        replica.reset_for_new_engine()
        replica.mark_weights_complete()
        fleet.join([0])

    def soon(replica: Replica, reason: str) -> None:
        asyncio.get_running_loop().call_soon(come_back, replica)

    fleet.on_lost = soon
    with pytest.raises(EngineError, match="lost its replica 21 times"):
        finish(answer(fleet, request(n=1)))


def test_a_request_may_be_handed_over_as_often_as_its_devices_are_wanted() -> None:
    writer = Writer()
    fleet = fleet_of(writer)

    async def take_turns() -> list[Completion]:
        long = replace(request(n=1), sampling=replace(SAMPLING, max_new_tokens=500))
        running = asyncio.create_task(answer(fleet, long))
        for _ in range(MAX_MOVES + 10):
            await turns(4)
            assert not running.done()
            await fleet.leave([0])
            fleet.join([0])
        return await running

    assert counts_up(finish(take_turns()), 1)
    assert len(writer.asked) > MAX_MOVES + 5


def test_an_engine_that_aborts_unasked_again_and_again_is_an_error() -> None:
    class Aborts(Writer):
        async def generate(self, request: GenerateRequest) -> list[Completion]:
            await asyncio.sleep(0)
            return [Completion.of((), (), (), FinishReason.ABORT)] * request.n

    with pytest.raises(EngineError, match="moved 20 times, and again: replica 0 aborted"):
        finish(answer(fleet_of(Aborts()), request(n=1)))


def test_a_seat_given_in_the_moment_of_a_cancellation_is_free_again() -> None:
    writer = Writer()
    fleet = fleet_of(writer, capacity=2)

    async def give_and_cancel() -> None:
        first = asyncio.create_task(answer(fleet, request("r0")))
        await turns(3)
        waiting = asyncio.create_task(answer(fleet, request("r1")))
        await turns(3)
        replica = fleet.replicas[0]
        before = replica.in_flight_sequences
        replica.capacity = 4
        fleet.join([0])
        replica.enter(State.SERVING)  # gives the seat
        assert replica.in_flight_sequences == before + 2
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert replica.in_flight_sequences == before
        await first

    finish(give_and_cancel())
    assert fleet.replicas[0].in_flight_tokens == 0


def test_places_of_ended_siblings_are_free_before_the_last_one_ends() -> None:
    writer = Writer()
    fleet = fleet_of(writer)

    async def look_near_the_end() -> list[Completion]:
        running = asyncio.create_task(answer(fleet, request(n=3)))
        while writer.written < 3 * (SAMPLING.max_new_tokens - 2):
            await asyncio.sleep(0)
        replica = fleet.replicas[0]
        assert replica.in_flight_sequences == 3
        replica.note(await writer.heartbeat())
        assert replica.in_flight_sequences == 2
        return await running

    assert counts_up(finish(look_near_the_end()), 3)
    assert fleet.replicas[0].in_flight_sequences == fleet.replicas[0].in_flight_tokens == 0
