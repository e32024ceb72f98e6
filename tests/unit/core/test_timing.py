"""Time in which overlapping work is under way, by a clock that a test moves."""

from contextlib import ExitStack

from roll.core.timing import BusyTime


def test_overlapping_blocks_count_once_and_the_time_between_them_not_at_all() -> None:
    now = [10.0]
    busy = BusyTime(lambda: now[0])
    with ExitStack() as first, ExitStack() as second:
        for step, (block, enters) in enumerate(
            [(first, True), (second, True), (first, False), (second, False)]
        ):
            now[0] = 11.0 + step  # 11: first, 12: both, 13: second, 14: none
            if enters:
                block.enter_context(busy.working())
            else:
                block.close()
    now[0] = 20.0
    assert busy.share() == 3 / 10


def test_a_block_that_is_under_way_counts_in_both_steps() -> None:
    now = [0.0]
    busy = BusyTime(lambda: now[0])
    with busy.working():
        now[0] = 4.0
        assert busy.share() == 1
        busy.restart()
        now[0] = 5.0
    now[0] = 8.0
    assert busy.share() == 1 / 4
    busy.restart()
    assert busy.share() == 0
