"""Two sessions of a run that send their metrics to a service, with the interpreter of its package.

    python two_sessions.py KIND OUTPUT_DIR KWARGS SITE_PACKAGES...

The paths at the end are searched last, for the packages of roll.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path += sys.argv[4:]

from roll.config.sections.lifecycle import TrackConfig, TrackerConfig
from roll.output_dir.trackers import open_trackers


def session(kind: str, output_dir: Path, kwargs: str, first: int) -> None:
    wanted = TrackerConfig(kind=kind, project="sorting", kwargs=json.loads(kwargs))
    config = TrackConfig(tensorboard=False, trackers=(wanted,))
    resolved = {"seed": 3, "model": {"path": "m"}}
    opened = open_trackers(config, output_dir, first_step=first, max_steps=4, resolved=resolved)
    with opened as trackers:
        for step in (first, first + 1):
            trackers.log(step, {"reward/mean": step / 4, "val/held_out/mean@1": float(step)})


if __name__ == "__main__":
    for start in (0, 2):
        session(sys.argv[1], Path(sys.argv[2]), sys.argv[3], start)
