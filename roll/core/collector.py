"""Python's garbage collector, told that most objects of a driver live on."""

from __future__ import annotations

import gc

THRESHOLD = (100_000, 50, 100)
"""Objects made before the youngest are searched for cycles, and how many such searches come before
one of the older. Measured by `benchmarks/simulate_rollout.py`."""


def calm_collector() -> None:
    """Search less often, and never again what exists now.

    A driver holds millions of objects, samples in flight, which are all in use and in no cycle.
    With Python's own threshold of 700 the search takes nearly half of the scheduler's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLD)
