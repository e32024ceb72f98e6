"""Check of trackers that users bring."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roll.config.user_code.tracebacks import users_traceback
from roll.output_dir.trackers.interface import TrackedRun, Tracker

RECORDS: Mapping[str, Mapping[str, float]] = {
    "an ordinary record": {"reward/mean": 0.5, "loss": -0.01, "val/held_out/mean@1": 0.25},
    "a record without a reward": {"loss": 1e-9},
    "an empty record": {},
    "a record with odd names": {"tag/a b/c@1": 0.0, "reward/ä/mean": 1e30},
}


def check_tracker(make: Callable[..., Tracker], *, kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise AssertionError, which names the record, if a tracker raises an error: for odd records,
    when it is closed, or in a second session of the run, which begins at a later step.

    A run switches such a tracker off and goes on.

    Args:
        make: class of the tracker, or function that makes one.
        kwargs: keyword arguments for it, as in the config.
    """
    with tempfile.TemporaryDirectory() as folder:
        for session, first_step in (("the first session", 0), ("a resumed session", 2)):
            run = TrackedRun(Path(folder), "check", "check-run", {"seed": 0}, first_step)
            what = f"{session}, when it is made"
            try:
                tracker = make(run, **(kwargs or {}))
                for step, (record, values) in enumerate(RECORDS.items(), first_step):
                    what = f"{session}, {record}"
                    tracker.log(step, values)
                what = f"{session}, when it is closed"
                tracker.close()
            except Exception as error:
                raise AssertionError(f"{what}: {users_traceback(error)}") from error
