"""Samples that hang, crash or eat memory: they cost themselves, and nothing else."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roll.config.sections.reward import RewardConfig
from roll.core.errors import RewardError
from roll.rewards.contract import sample_of
from roll.rewards.execution.child import (
    Child,
    ChildDiedError,
    ChildRaisedError,
    ChildSpec,
    ChildTimeoutError,
)
from roll.rewards.execution.pool import RewardPool, Scored
from roll.rewards.execution.runners import MAX_HUNG_THREADS
from roll.rewards.math.reward import math_reward
from tests.unit.rewards.reward_functions import RELEASE

OBEY = "tests.unit.rewards.reward_functions:obey"


async def _scored(pool: RewardPool, *responses: str) -> list[Scored]:
    return await pool.score([sample_of(response, answer="") for response in responses])


def _children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True)}


def test_hostile_samples_cannot_take_down_others() -> None:
    before = _children()
    config = RewardConfig(fn=OBEY, in_process=False, timeout_s=0.5, max_error_rate=1.0)
    pool = RewardPool.from_config("r", config, seed=0)
    pool.begin_step(9)
    orders = ["ok", "spin", "ok", "exit", "ok", "crash", "hang", "raise", "ok"]
    scored = asyncio.run(_scored(pool, *orders))
    right = [order == "ok" for order in orders]
    assert [s.reward is not None and s.reward.score == 1 for s in scored] == right
    assert [s.reward is None for s in scored] == [not ok for ok in right]
    assert [s.timed_out for s in scored] == [order in ("spin", "hang") for order in orders]
    assert "exit code 3" in str(scored[3].failure)
    assert "SIGSEGV" in str(scored[5].failure)
    metrics = pool.take_metrics().values_by_name()
    assert metrics["reward/r/error_rate"] == pytest.approx(3 / 9)
    assert metrics["reward/r/timeout_rate"] == pytest.approx(2 / 9)
    pool.close()
    _wait_until(lambda: _children() <= before, "the pool's children to be gone")


def test_hung_threads_are_bounded_and_the_way_out_is_named() -> None:
    async def steps() -> str:
        config = RewardConfig(fn=OBEY, timeout_s=0.05, max_error_rate=1.0)
        pool = RewardPool.from_config("slow", config, seed=0)
        pool.begin_step(100)
        first = await _scored(pool, *["wait"] * MAX_HUNG_THREADS)
        assert all(s.timed_out for s in first)
        with pytest.raises(RewardError) as raised:
            await _scored(pool, "ok")
        RELEASE.set()
        for _ in range(200):  # the threads come back, and so does the pool
            await asyncio.sleep(0.01)
            try:
                [again] = await _scored(pool, "ok")
            except RewardError:
                continue
            assert again.reward is not None
            assert again.reward.score == 1
            return str(raised.value)
        raise AssertionError("the pool does not recover after its threads have come back")

    RELEASE.clear()
    assert "rewards.slow.in_process: false" in asyncio.run(steps())


def test_a_hung_thread_does_not_keep_the_process_alive() -> None:
    program = (
        "import asyncio\n"
        "from roll.config.sections.reward import RewardConfig\n"
        "from roll.rewards.execution.pool import RewardPool\n"
        "from roll.rewards.contract import sample_of\n"
        f"config = RewardConfig(fn={OBEY!r}, timeout_s=0.1, max_error_rate=1.0)\n"
        "pool = RewardPool.from_config('r', config, seed=0)\n"
        "pool.begin_step(1)\n"
        "asyncio.run(pool.score([sample_of('hang', answer='')]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=120, check=False, cwd=_root())
    assert done.returncode == 0


def test_children_end_when_their_parent_is_killed() -> None:
    program = (
        "import sys\n"
        "from roll.rewards.execution.child import Child, ChildSpec\n"
        "spec = ChildSpec('tests.faults.test_hostile_rewards:make_sleeper')\n"
        "idle, busy = Child(spec), Child(spec)\n"
        "print(idle.call('pid', 5), busy.call('pid', 5), flush=True)\n"
        "busy.call('spin', 1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=_root()
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.2)
        parent.kill()
    assert len(pids) == 2
    _wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "orphans to end", 15)


def test_a_child_is_limited_in_memory_and_lives_on_after_an_error() -> None:
    child = Child(ChildSpec("tests.faults.test_hostile_rewards:make_sleeper", (), 2**26))
    try:
        pid = child.call("pid", 10)
        with pytest.raises(ChildRaisedError, match="MemoryError"):
            child.call("eat", 10)
        assert child.call("pid", 10) == pid
        with pytest.raises(ChildTimeoutError):
            child.call("spin", 0.3)
        assert child.call("pid", 10) != pid
        with pytest.raises(ChildDiedError, match="exit code 5"):
            child.call("exit", 10)
    finally:
        child.close()


def test_a_forked_child_is_back_at_once_after_a_timeout() -> None:
    spec = ChildSpec("tests.faults.test_hostile_rewards:make_sleeper", (), 2**26, fork=True)
    child = Child(spec)
    try:
        pid = child.call("pid", 10)
        with pytest.raises(ChildTimeoutError):
            child.call("spin", 0.3)
        assert child.is_running
        assert child.call("pid", 10) not in (pid, os.getpid())
        with pytest.raises(ChildDiedError, match="exit code 5"):
            child.call("exit", 10)
        assert not child.is_running
        assert child.call("pid", 10) != pid
    finally:
        child.close()


def test_a_factory_that_cannot_be_imported_says_so() -> None:
    with pytest.raises(ChildRaisedError, match="no module named 'no_such'"):
        Child(ChildSpec("no_such:thing")).call(1, 1)


@pytest.mark.slow
def test_hostile_answers_are_wrong_and_ordinary_ones_still_right() -> None:
    hostile = [
        "9^{9^{9^{9^9}}}",
        "9^9^9^9",
        "(99999999!)!",
        "(" * 3000 + ")" * 3000,
        r"\sqrt{" * 300 + "2" + "}" * 300,
        r"\int_0^1 " * 40 + "x",
        "{" * 1500,
        "1+" * 900 + "x",
        r"\frac{1}" * 500,
        "x^{y^{z^{" * 50 + "}}}" * 50,
    ]
    start = time.monotonic()
    for answer in hostile:
        verdict = math_reward(sample_of(f"\\boxed{{{answer}}}", answer="x+1"))
        assert verdict.score == 0, answer[:40]
        fine = math_reward(sample_of(r"\boxed{1+x}", answer="x+1"))
        assert fine.score == 1, answer[:40]
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 100_000,
        "\\boxed" + " " * 1_000_000,
        "{" * 1_000_000,
        "1," * 500_000,
        "#### " * 200_000,
        "1" * 1_000_000,
        "-" * 1_000_000,
        "<think>" * 100_000,
    ],
    ids=lambda response: response[:8],
)
def test_looking_for_an_answer_is_linear(response: str) -> None:
    start = time.process_time()  # other tests may have the cores meanwhile
    math_reward(sample_of(response, answer="7"))
    assert time.process_time() - start < 2


def make_sleeper() -> object:
    """The function of a child that does what it is told."""

    def obey(order: str) -> int:
        if order == "spin":
            return 9**9**9
        if order == "eat":
            return len(bytearray(2**30))
        if order == "exit":
            os._exit(5)
        return os.getpid()

    return obey


def _root() -> Path:
    return Path(__file__).parents[2]


def _wait_until(condition: object, what: str, timeout_s: float = 60) -> None:
    assert callable(condition)
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)
