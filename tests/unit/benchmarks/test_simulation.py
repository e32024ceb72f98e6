"""Virtual time and scripted engines, against a brute-force simulation in small steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from statistics import NormalDist, fmean, median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.clock import StuckError, run_virtually
from benchmarks.simulation.engine import PROMPT_TOKENS, EngineModel, ScriptedEngine
from benchmarks.simulation.lengths import Fixed, Lengths, LogNormal, Pareto, uniform
from benchmarks.simulation.tokens import StoredTokens
from roll.core.completion import Completion, FinishReason, Written
from roll.core.errors import EngineDiedError
from roll.core.types import GenerateRequest, Piece, SamplingParams

QUICK = EngineModel(
    capacity=4, knee=2, tokens_per_s=1.0, prefill_tokens_per_s=16.0, pause_s=3.0, restart_s=50.0
)
"""The prefill of a prompt takes one second."""


class Listed(Lengths):
    """The lengths given, by seed."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def draw(self, key: int) -> float:
        return float(self.lengths[key])


def request(name: str, *, n: int = 1, seed: int = 0, limit: int = 1000) -> GenerateRequest:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=limit)
    return GenerateRequest(name, (0,) * PROMPT_TOKENS, sampling, n, seed)


def engine(lengths: Lengths, model: EngineModel = QUICK) -> ScriptedEngine:
    return ScriptedEngine(0, model, lengths)


def virtually(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return run_virtually(main())


def test_a_long_sleep_takes_no_time_and_timers_fire_in_their_order() -> None:
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []
        loop = asyncio.get_running_loop()

        async def wake(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            seen.append((name, loop.time()))

        await asyncio.gather(wake("c", 3e6), wake("a", 1.5), wake("b", 2.0))
        return seen

    assert virtually(main) == [
        ("a", pytest.approx(1.5)),
        ("b", pytest.approx(2.0)),
        ("c", pytest.approx(3e6)),
    ]


def test_a_wait_that_can_never_end_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StuckError, match="an endless wait"):
        virtually(main)


def test_a_timeout_in_virtual_time_ends_a_wait() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert virtually(main) == pytest.approx(3600)


def test_lengths_follow_their_distributions() -> None:
    count = 20_000
    assert fmean(uniform(i) for i in range(count)) == pytest.approx(0.5, abs=0.01)
    normal = [LogNormal(64, 1.0).draw(i) for i in range(count)]
    assert median(normal) == pytest.approx(64, rel=0.03)
    assert fmean(normal) == pytest.approx(64 * 2.718281828**0.5, rel=0.05)
    above = fmean(length > 64 * 2.718281828**2 for length in normal)
    assert above == pytest.approx(1 - NormalDist().cdf(2), abs=0.005)
    heavy = [Pareto(64, 1.5).draw(i) for i in range(count)]
    assert median(heavy) == pytest.approx(64, rel=0.03)
    assert fmean(length > 4 * 64 for length in heavy) == pytest.approx(0.5 * 4**-1.5, abs=0.005)


def brute_force(
    arrivals: list[float], lengths: list[int], model: EngineModel, step_s: float
) -> list[float]:
    """When each of these single requests ends, by small steps of time."""
    left = {i: float(length) for i, length in enumerate(lengths)}
    ended = [0.0] * len(lengths)
    order: list[int] = []
    now_s = 0.0
    while left:
        order += [i for i, at_s in enumerate(arrivals) if i not in order and at_s <= now_s]
        running = [i for i in order if i in left][: model.capacity]
        now_s += step_s
        for i in running:
            left[i] -= step_s * model.tokens_per_s * min(1.0, model.knee / len(running))
            if left[i] <= 0:
                del left[i]
                ended[i] = now_s
    return ended


@given(
    work=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 15)),
        min_size=1,
        max_size=9,
        unique_by=lambda one: one[0],
    ).map(sorted)
)
@settings(max_examples=25)
def test_sequences_end_when_a_simulation_in_small_steps_says(work: list[tuple[int, int]]) -> None:
    arrivals, lengths = [float(at) for at, _ in work], [length for _, length in work]
    model = replace(QUICK, prefill_tokens_per_s=1e9)

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        scripted = engine(Listed(*lengths), model)

        async def one(i: int) -> float:
            await asyncio.sleep(arrivals[i])
            (done,) = await scripted.generate(request(f"r{i}", seed=i))
            assert list(done.tokens) == [lengths[i]] * lengths[i]
            return loop.time()

        return list(await asyncio.gather(*(one(i) for i in range(len(work)))))

    assert virtually(main) == pytest.approx(
        brute_force(arrivals, lengths, model, 0.04), abs=0.04 * (3 + 2 * len(work))
    )


def test_tokens_carry_the_version_that_wrote_them_and_a_push_costs_its_pause() -> None:
    async def main() -> tuple[Completion, float]:
        loop = asyncio.get_running_loop()
        scripted = engine(Fixed(10))
        going = asyncio.ensure_future(scripted.generate(request("r")))
        await asyncio.sleep(1 + 4)  # prefill, four tokens
        await scripted.load_weights(7)
        (done,) = await going
        return done, loop.time()

    done, end_s = virtually(main)
    assert done.versions.runs == ((0, 4), (7, 6))
    # The pause, and the prefill of the prompt and four tokens again.
    assert end_s == pytest.approx(1 + 10 + 3 + 20 / 16)


def test_heartbeats_give_each_token_once_and_a_request_goes_on_elsewhere() -> None:
    async def main() -> list[int]:
        scripted, other = engine(Listed(4, 12)), engine(Fixed(0))
        going = asyncio.ensure_future(scripted.generate(request("r", n=2)))
        heard: list[tuple[Piece, ...]] = []
        for _ in range(3):
            await asyncio.sleep(2.5)
            heard.append((await scripted.heartbeat()).progress["r"])
        scripted.crash()
        with pytest.raises(EngineDiedError, match="scripted engine 0 crashed"):
            await going
        with pytest.raises(EngineDiedError, match="is dead"):
            await scripted.generate(request("again"))
        assert [len(pieces[1].written.tokens) for pieces in heard] == [1, 3, 2]
        assert [len(pieces[0].written.tokens) for pieces in heard] == [1, 3, 0]
        assert [pieces[1].start for pieces in heard] == [0, 1, 4]
        assert heard[-1][0].written.finish is FinishReason.STOP
        assert heard[-1][1].written.finish is FinishReason.ABORT
        written = tuple(token for pieces in heard for token in pieces[1].written.tokens)
        rest = GenerateRequest(
            "rest", (0,) * PROMPT_TOKENS + written, SamplingParams(1.0, 1000 - len(written)), 1, 99
        )
        return [*written, *(await other.generate(rest))[0].tokens]

    assert virtually(main) == [12] * 12


def test_an_abort_gives_back_what_is_written_and_its_place_to_the_next() -> None:
    async def main() -> tuple[list[Completion], float]:
        loop = asyncio.get_running_loop()
        scripted = engine(Listed(100, 100, 100, 100, 5, 5))
        first = asyncio.ensure_future(scripted.generate(request("first", n=4)))
        second = asyncio.ensure_future(scripted.generate(request("second", seed=4, n=2)))
        await asyncio.sleep(2 + 6)  # two prefills; four sequences at half pace
        await scripted.abort("first")
        await second
        assert loop.time() == pytest.approx(8 + 5)
        return await first, scripted.busy_slot_s

    completions, busy_slot_s = virtually(main)
    assert [len(one.tokens) for one in completions] == [3] * 4
    assert {one.finish for one in completions} == {FinishReason.ABORT}
    assert busy_slot_s == pytest.approx(8 * 4 + 5 * 2)


def test_only_unfinished_responses_bring_their_tokens() -> None:
    async def main() -> list[Completion]:
        scripted = engine(Listed(4, 12))
        going = asyncio.ensure_future(scripted.generate(request("r", n=2)))
        await asyncio.sleep(1 + 6)  # prefill, six tokens
        await scripted.abort("r")
        return await going

    finished, unfinished = virtually(main)
    assert finished.content == StoredTokens(length=4, count=4)
    assert list(finished.tokens) == [4] * 4
    assert len(finished.logprobs) == 4
    assert isinstance(unfinished.content, Written)
    assert list(unfinished.tokens) == [12] * 6
    assert len(unfinished.logprobs) == 6


def test_a_response_at_the_limit_is_cut_off_and_says_so() -> None:
    async def main() -> list[Completion]:
        return await engine(Listed(30, 9)).generate(request("r", n=2, limit=10))

    long, short = virtually(main)
    assert (len(long.tokens), long.finish) == (10, FinishReason.LENGTH)
    assert (len(short.tokens), short.finish) == (9, FinishReason.STOP)


def test_a_hanging_engine_answers_nothing_until_it_is_started_again() -> None:
    async def main() -> None:
        scripted = engine(Fixed(10))
        going = asyncio.ensure_future(scripted.generate(request("r")))
        await asyncio.sleep(3)
        scripted.hang()
        for call in (scripted.heartbeat(), scripted.abort("r"), scripted.load_weights(1)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 1000)
        assert not going.done()
        await scripted.restart()
        with pytest.raises(EngineDiedError):
            await going
        assert asyncio.get_running_loop().time() == pytest.approx(3 + 3000 + 50)
        (done,) = await scripted.generate(request("again"))
        assert len(done.tokens) == 10

    virtually(main)


def test_a_straggler_takes_its_factor_longer() -> None:
    async def main() -> float:
        scripted = engine(Fixed(10))
        scripted.slow_by(4.0)
        await scripted.generate(request("r"))
        return asyncio.get_running_loop().time()

    assert virtually(main) == pytest.approx(4 * (1 + 10))


def test_heartbeats_tell_what_was_prefilled_also_again_after_new_weights() -> None:
    async def main() -> list[int]:
        scripted = engine(Fixed(100))
        going = asyncio.ensure_future(scripted.generate(request("r")))
        told: list[int] = []

        async def listen_after(seconds: float) -> None:
            await asyncio.sleep(seconds)
            told.append((await scripted.heartbeat()).prefilled_tokens)

        await listen_after(0.5)
        await listen_after(0.5 + 4)  # the rest of the prompt, four tokens
        await scripted.load_weights(1)  # three seconds, in which nothing is computed
        await listen_after(0.0)
        await listen_after(0.5)
        await listen_after(10.0)
        scripted.crash()
        with pytest.raises(EngineDiedError):
            await going
        return told

    assert virtually(main) == [8, 16, 16, 24, 16 + 20]
