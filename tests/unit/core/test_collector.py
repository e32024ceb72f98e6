"""The driver's garbage collector."""

import gc

from roll.platform.collector import THRESHOLD, calm_collector


def test_what_exists_is_left_alone_and_new_cycles_are_still_found() -> None:
    before = gc.get_threshold()
    try:
        calm_collector()
        assert gc.get_threshold() == THRESHOLD
        assert gc.get_freeze_count() > 1000
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
