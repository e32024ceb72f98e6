"""Settings of Python's garbage collector for a driver, most of whose objects live long."""

from __future__ import annotations

import gc

THRESHOLD = (100_000, 50, 100)
"""Arguments of `gc.set_threshold`: number of new objects after which generation 0 is searched for
reference cycles, then the number of searches of generation 0 per search of generation 1, and of
generation 1 per search of generation 2. Measured by `benchmarks/simulate_rollout.py`."""


def calm_collector() -> None:
    """Let the garbage collector search less often, and never search the objects that exist now.

    A driver holds samples in flight, which are millions of objects. All of them are in use, and
    none is in a reference cycle. With Python's own threshold of 700 new objects, the searches take
    nearly half of the scheduler's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLD)
