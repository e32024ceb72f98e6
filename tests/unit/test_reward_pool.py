"""The pool's bounds: concurrency, time, failures; and what it reports."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from roll.config.reward import RewardConfig
from roll.core.errors import RewardError
from roll.core.types import Sample
from roll.rewards.api import RewardContext
from roll.rewards.contract import sample_of
from roll.rewards.loading import bind_reward
from roll.rewards.pool import ErrorBudget, RewardPool, Scored

HERE = "tests.unit.reward_functions"


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


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("fn", ["length", "length_async"])
def test_verdicts_come_in_the_order_of_the_samples(fn: str, in_process: bool) -> None:
    responses = ["x" * n for n in (5, 1, 4, 0, 3)]
    scored, metrics = _score(_config(f"{HERE}:{fn}", in_process=in_process), *responses)
    assert [s.reward.score for s in scored] == [5, 1, 4, 0, 3]
    assert metrics["reward/r/mean"] == 2.6
    assert metrics["reward/r/error_rate"] == metrics["reward/r/timeout_rate"] == 0
    if fn == "length_async":
        assert metrics["reward/r/seed"] == 7


def test_in_process_false_runs_elsewhere() -> None:
    import os

    [here], _ = _score(_config(f"{HERE}:process_id"), "")
    [there], _ = _score(_config(f"{HERE}:process_id", in_process=False), "")
    assert here.reward.parts["pid"] == os.getpid() != there.reward.parts["pid"]


@pytest.mark.parametrize("in_process", [True, False])
def test_failures_cost_their_own_sample_only(in_process: bool) -> None:
    config = _config(max_error_rate=1.0, on_error=-1.0, in_process=in_process)
    scored, metrics = _score(config, "ok", "raise", "nan", "text", "quit", "print")
    assert [s.reward.score for s in scored] == [1, -1, -1, -1, -1, 1]
    assert [s.failure is None for s in scored] == [True, False, False, False, False, True]
    assert "KeyError" in str(scored[1].failure)
    assert "finite" in str(scored[2].failure)
    assert metrics["reward/r/error_rate"] == pytest.approx(4 / 6)
    assert metrics["reward/r/timeout_rate"] == 0


@pytest.mark.parametrize("in_process", [True, False])
def test_too_many_failures_stop_the_run_with_the_first_traceback(in_process: bool) -> None:
    with pytest.raises(RewardError) as raised:
        _score(_config(max_error_rate=0.25, in_process=in_process), "ok", "raise", "raise", "ok")
    message = str(raised.value)
    assert "'r' failed on 2 of 4 samples" in message
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


def _run_bound(fn: Callable[..., Any], responses: list[str], **settings: Any) -> list[Scored]:
    bound = bind_reward(fn, {}, RewardContext("r", 0), label="fn")
    pool = RewardPool.from_bound("r", _config(**settings), bound)
    pool.begin_step(len(responses))
    return asyncio.run(pool.score([sample_of(r, answer="") for r in responses]))
