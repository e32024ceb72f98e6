"""The pool's bounds: concurrency, time, failures; and what it reports."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from roll.config.sections.reward import RewardConfig
from roll.core.errors import RewardError
from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext
from roll.rewards.contract import sample_of
from roll.rewards.execution.child_pool import NoChildFreeError
from roll.rewards.execution.pool import ErrorBudget, RewardPool, Scored
from roll.rewards.loading import bind_reward
from roll.rewards.math.reward import judge

HERE = "tests.unit.rewards.reward_functions"


def _config(fn: str = f"{HERE}:obey", **settings: Any) -> RewardConfig:
    return RewardConfig(fn=fn, **settings)


def _score(config: RewardConfig, *responses: str) -> tuple[list[Scored], dict[str, float]]:
    pool = RewardPool.from_config("r", config, seed=7)
    try:
        pool.begin_step(len(responses))
        samples = [sample_of(response, answer="") for response in responses]
        scored = asyncio.run(pool.score(samples))
        return scored, pool.take_metrics().values_by_name()
    finally:
        pool.close()


def _scores(scored: list[Scored]) -> list[float | None]:
    """None where there is no reward."""
    return [None if each.reward is None else each.reward.score for each in scored]


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("fn", ["length", "length_async"])
def test_verdicts_come_in_the_order_of_the_samples(fn: str, in_process: bool) -> None:
    responses = ["x" * n for n in (5, 1, 4, 0, 3)]
    scored, metrics = _score(_config(f"{HERE}:{fn}", in_process=in_process), *responses)
    assert _scores(scored) == [5, 1, 4, 0, 3]
    assert metrics["reward/r/mean"] == 2.6
    assert metrics["reward/r/error_rate"] == metrics["reward/r/timeout_rate"] == 0
    if fn == "length_async":
        assert metrics["reward/r/seed"] == 7


def test_in_process_false_runs_elsewhere() -> None:
    import os

    [here], _ = _score(_config(f"{HERE}:process_id"), "")
    [there], _ = _score(_config(f"{HERE}:process_id", in_process=False), "")
    assert here.reward is not None
    assert there.reward is not None
    assert here.reward.parts["pid"] == os.getpid() != there.reward.parts["pid"]


@pytest.mark.parametrize("fn", ["obey", "obey_async"])
@pytest.mark.parametrize("in_process", [True, False])
def test_failures_cost_their_own_sample_only(in_process: bool, fn: str) -> None:
    settings = {"max_error_rate": 1.0, "on_error": -1.0, "in_process": in_process}
    config = _config(f"{HERE}:{fn}", **settings)
    scored, metrics = _score(config, "ok", "raise", "nan", "text", "quit", "cancel", "print")
    assert _scores(scored) == [1, -1, -1, -1, -1, -1, 1]
    assert [s.failure is None for s in scored] == [True, *[False] * 5, True]
    assert "KeyError" in str(scored[1].failure)
    assert "finite" in str(scored[2].failure)
    assert "CancelledError" in str(scored[5].failure)
    assert metrics["reward/r/error_rate"] == pytest.approx(5 / 7)
    assert metrics["reward/r/timeout_rate"] == 0


@pytest.mark.parametrize("in_process", [True, False])
def test_too_many_failures_stop_the_run_with_the_first_traceback(in_process: bool) -> None:
    with pytest.raises(RewardError) as raised:
        _score(_config(max_error_rate=0.25, in_process=in_process), "ok", "raise", "raise", "ok")
    message = str(raised.value)
    assert "'r' failed on 2 of the first" in message
    assert "(2 errors, 0 timeouts)" in message
    assert "KeyError: 'no such column'" in message
    assert "reward_functions.py" in message


def test_the_budget_is_of_the_whole_step_and_starts_anew() -> None:
    async def steps() -> None:
        pool = RewardPool.from_config("r", _config(max_error_rate=0.25), seed=0)
        bad = [sample_of("raise", answer="")]
        for _ in range(3):
            pool.begin_step(expected_samples=8)
            await pool.score(bad)
            await pool.score(bad)
        with pytest.raises(RewardError):
            await pool.score(bad)

    asyncio.run(steps())


def test_a_failure_counts_in_the_step_in_which_its_sample_came() -> None:
    async def steps() -> None:
        go_on = threading.Event()

        def late(sample: Sample) -> float:
            if sample.id == "late":
                go_on.wait()
            raise KeyError(sample.id)

        def named(name: str) -> list[Sample]:
            return [replace(sample_of("", answer=""), id=name)]

        bound = bind_reward(late, {}, RewardContext("r", 0), label="fn")
        pool = RewardPool.from_bound("r", _config(max_error_rate=0.25), bound)
        try:
            pool.begin_step(expected_samples=4)
            first = asyncio.ensure_future(pool.score(named("late")))
            await asyncio.sleep(0)  # it begins
            pool.begin_step(expected_samples=4)
            go_on.set()
            await first
            await pool.score(named("next"))
            with pytest.raises(RewardError, match="failed on 2 of") as raised:
                await pool.score(named("last"))
            assert "KeyError: 'next'" in str(raised.value), "the first failure of its own step"
        finally:
            pool.close()

    asyncio.run(steps())


def test_rounding_does_not_move_the_budget() -> None:
    assert not ErrorBudget(0.1, 30, seen=30, errors=2, timeouts=1).exceeded
    assert ErrorBudget(0.1, 30, seen=30, errors=3, timeouts=1).exceeded
    assert ErrorBudget(0.0, 8, seen=1, errors=1).exceeded


@pytest.mark.parametrize("fn", ["obey", "obey_async"])
def test_a_hanging_sample_times_out_and_the_others_are_scored(fn: str) -> None:
    config = _config(f"{HERE}:{fn}", timeout_s=0.2, max_error_rate=1.0)
    scored, metrics = _score(config, "hang", "ok", "ok", "ok")
    assert [s.timed_out for s in scored] == [True, False, False, False]
    assert metrics["reward/r/timeout_rate"] == 0.25
    assert metrics["reward/r/error_rate"] == 0


@pytest.mark.alone
def test_an_async_reward_that_blocks_stops_the_run_and_the_callers_loop_goes_on() -> None:
    async def steps() -> tuple[str, int]:
        config = _config(f"{HERE}:blocking_async", timeout_s=0.1, max_error_rate=1.0)
        pool = RewardPool.from_config("judge", config, seed=0)
        pool.begin_step(2)
        scoring = asyncio.ensure_future(
            pool.score([sample_of(response, answer="") for response in ("block", "ok")])
        )
        turns = 0
        while not scoring.done():
            await asyncio.sleep(0.01)
            turns += 1
        pool.close()
        with pytest.raises(RewardError) as raised:
            await scoring
        return str(raised.value), turns

    begun = time.monotonic()
    message, turns = asyncio.run(steps())
    assert time.monotonic() - begun < 0.9  # before the sleep is over
    assert "'judge' is `async` but blocks" in message
    assert "rewards.judge.in_process: false" in message
    assert turns >= 5


def test_a_short_block_only_costs_time() -> None:
    config = _config(f"{HERE}:blocking_async", timeout_s=5.0)
    scored, metrics = _score(config, "ok", "block", "ok")
    assert _scores(scored) == [1, 1, 1]
    assert metrics["reward/r/timeout_rate"] == 0


def test_all_calls_and_what_is_hosted_share_one_loop() -> None:
    loops = set()

    async def note(sample: Sample) -> float:
        loops.add(asyncio.get_running_loop())
        return 0.0

    async def steps() -> None:
        bound = bind_reward(note, {}, RewardContext("r", 0), label="fn")
        pool = RewardPool.from_bound("r", _config(), bound)
        pool.begin_step(2)

        async def setup() -> None:
            loops.add(asyncio.get_running_loop())

        await pool.host(setup)
        await pool.score([sample_of("a", answer=""), sample_of("b", answer="")])
        pool.close()
        assert asyncio.get_running_loop() not in loops

    asyncio.run(steps())
    assert len(loops) == 1


def test_busy_math_checkers_are_a_timeout_of_the_reward_and_not_a_wrong_answer() -> None:
    def busy(truth: str, answer: str) -> bool | None:
        raise NoChildFreeError("no child free within 5 s")

    def reward(sample: Sample) -> Reward:
        return judge(sample, busy)

    [scored] = _run_bound(reward, [r"\boxed{x + 1}"], answer="1 + x", max_error_rate=1.0)
    assert scored.timed_out
    assert "no child free" in str(scored.failure)


def test_no_more_than_concurrency_run_at_once() -> None:
    running, most = 0, 0

    async def watch(sample: Sample) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return 0.0

    assert _run_bound(watch, ["x"] * 20, concurrency=3)
    assert most == 3


def test_metrics_are_taken_once() -> None:
    pool = RewardPool.from_config("r", _config(), seed=0)
    pool.begin_step(1)
    asyncio.run(pool.score([sample_of("ok", answer="")]))
    assert pool.take_metrics()
    assert not pool.take_metrics()


def test_scoring_before_a_step_begins_is_refused() -> None:
    pool = RewardPool.from_config("r", _config(), seed=0)
    with pytest.raises(ValueError, match="begin_step"):
        asyncio.run(pool.score([]))


def _run_bound(
    fn: Callable[..., Any], responses: list[str], answer: str = "", **settings: Any
) -> list[Scored]:
    bound = bind_reward(fn, {}, RewardContext("r", 0), label="fn")
    pool = RewardPool.from_bound("r", _config(**settings), bound)
    pool.begin_step(len(responses))
    try:
        return asyncio.run(pool.score([sample_of(r, answer=answer) for r in responses]))
    finally:
        pool.close()


class Slow:
    """A runner that takes a while for each sample, one after another."""

    width = 1
    calls = 0

    async def run(self, work: Any) -> Any:
        self.calls += 1
        await asyncio.sleep(0.05)
        return Reward(1.0)

    async def host(self, make: Any, timeout_s: float | None) -> None:
        await make()

    def close(self) -> None:
        pass


def test_the_time_in_the_queue_and_the_time_of_the_function_are_told_apart() -> None:
    pool = RewardPool("r", _config(), Slow())
    pool.begin_step(3)
    asyncio.run(pool.score([sample_of("", answer="")] * 3))
    metrics = pool.take_metrics().values_by_name()
    assert metrics["rewards/r/run_s"] >= 0.045
    # They wait for 0, 1 and 2 others: as long as one runs, on average.
    assert metrics["rewards/r/queue_s"] == pytest.approx(metrics["rewards/r/run_s"], rel=0.3)
    assert "rewards/r/run_s" not in pool.take_metrics()


def test_who_waits_too_long_for_a_place_fails_without_a_call() -> None:
    runner = Slow()
    pool = RewardPool("r", _config(queue_timeout_s=0.02, max_error_rate=1.0), runner)
    pool.begin_step(3)
    scored = asyncio.run(pool.score([sample_of("", answer="")] * 3))
    assert _scores(scored) == [1.0, None, None]
    assert [one.timed_out for one in scored] == [False, True, True]
    assert scored[1].failure == "TimeoutError: no place free within queue_timeout_s = 0.02"
    assert runner.calls == 1
    again = asyncio.run(pool.score([sample_of("", answer="")]))  # no place is lost
    assert _scores(again) == [1.0]
    assert pool.take_metrics()["reward/r/timeout_rate"].value() == 0.5


def test_a_limit_of_cpu_time_lets_a_call_wait_but_not_compute() -> None:
    config = _config(in_process=False, clock="cpu", timeout_s=0.4, concurrency=1, max_error_rate=1)
    scored, _ = _score(config, "nap", "spin", "ok")
    assert _scores(scored) == [1.0, None, 1.0]
    assert scored[1].timed_out


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"clock": "cpu"}, "set `in_process: false`"),
        ({"fn": None, "model": {"path": "m"}, "queue_timeout_s": 1.0}, "Drop `queue_timeout_s`"),
    ],
)
def test_limits_that_would_have_no_effect_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        RewardConfig(**{"fn": "math", **settings})
