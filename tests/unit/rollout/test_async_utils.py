"""Several coroutines at once, and a time limit that many waits share; in virtual time."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from benchmarks.simulation.clock import run_virtually
from roll.rollout.async_utils import SharedTimeout, all_or_first_error, ended_by, first_done


async def after(seconds: float, value: str) -> str:
    await asyncio.sleep(seconds)
    return value


async def fails_after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    raise ValueError(f"failed after {seconds:g} s")


def test_the_first_to_end_are_returned_in_the_order_in_which_they_were_given() -> None:
    async def main() -> tuple[list[str], float]:
        work = [after(3, "a"), after(9, "b"), after(1, "c"), after(2, "d")]
        return await first_done(work, 3), asyncio.get_running_loop().time()

    assert run_virtually(main()) == (["a", "c", "d"], 3)


def test_of_those_that_end_in_one_turn_of_the_loop_the_first_count() -> None:
    async def main() -> list[str]:
        ends = [asyncio.Event() for _ in "abc"]

        async def waits(end: asyncio.Event, value: str) -> str:
            await end.wait()
            return value

        def end_all() -> None:
            for index in (2, 0, 1):
                ends[index].set()

        asyncio.get_running_loop().call_later(1, end_all)
        return await first_done(list(map(waits, ends, "abc")), 2)

    assert run_virtually(main()) == ["a", "c"]


def test_after_a_failure_the_others_are_stopped_and_the_error_is_raised() -> None:
    async def main() -> float:
        with pytest.raises(ValueError, match="failed after 2 s"):
            await all_or_first_error([after(9, "a"), fails_after(2), fails_after(4)])
        assert len(asyncio.all_tasks()) == 1
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 2


def test_nothing_at_all_is_done_at_once() -> None:
    assert run_virtually(all_or_first_error([])) == []


def test_work_is_ended_when_somebody_asks_for_it() -> None:
    async def main(ends_s: float) -> tuple[str | None, float]:
        clock = asyncio.get_running_loop().time
        result = await ended_by(lambda: clock() >= ends_s, after(5, "a"))
        assert len(asyncio.all_tasks()) == 1
        return result, round(clock(), 6)

    assert run_virtually(main(inf)) == ("a", 5)
    assert run_virtually(main(3)) == (None, 3)
    assert run_virtually(main(0)) == (None, 0)


def test_an_error_of_work_that_may_be_ended_goes_on() -> None:
    with pytest.raises(ValueError, match="failed after 2 s"):
        run_virtually(ended_by(lambda: False, fails_after(2)))


def test_a_shared_limit_of_infinity_is_none() -> None:
    async def main() -> float:
        with SharedTimeout(inf).wait():
            await asyncio.sleep(1e6)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 1e6


def test_waits_that_share_a_limit_expire_each_at_its_own_time() -> None:
    limit = SharedTimeout(5)

    async def wait(begin_s: float, sleep_s: float) -> tuple[str, float]:
        await asyncio.sleep(begin_s)
        how = "ended"
        try:
            with limit.wait() as one:
                await asyncio.sleep(sleep_s)
        except TimeoutError:
            assert one.expired
            how = "expired"
        return how, asyncio.get_running_loop().time()

    async def main() -> list[tuple[str, float]]:
        return await asyncio.gather(*(wait(*each) for each in ((0, 9), (1, 2), (2, 9), (30, 9))))

    assert run_virtually(main()) == [
        ("expired", 5), ("ended", 3), ("expired", 7), ("expired", 35)
    ]  # fmt: skip


def test_a_timeout_error_from_inside_a_wait_is_not_its_own() -> None:
    async def main() -> None:
        wait = SharedTimeout(5).wait()
        with pytest.raises(TimeoutError, match="the grader's own"), wait:
            raise TimeoutError("the grader's own")
        assert not wait.expired

    run_virtually(main())


def test_a_task_that_is_cancelled_while_its_wait_expires_stays_cancelled() -> None:
    async def main() -> None:
        async def wait() -> None:
            with SharedTimeout(5).wait():
                await asyncio.sleep(9)

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_at(5, task.cancel)
        await asyncio.wait([task])
        assert task.cancelled()

    run_virtually(main())
