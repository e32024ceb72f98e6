"""The progress bar of `roll run`, in a real terminal and without one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from roll.core.timing import Timers

SCRIPT = """
import time
from roll.core.timing import Timers
from roll.output_dir.trackers.console import ConsoleTracker
timers = Timers()
tracker = ConsoleTracker(first_step=0, max_steps=4, phase=lambda: timers.phase)
with timers.timed("weight_sync"):
    tracker.log(0, {"reward/mean": 0.5, "perf/generated_tokens_per_s": 1206.4})
    time.sleep(0.5)
tracker.close()
"""


def in_terminal() -> str:
    """What the script writes where its error output is a terminal."""
    ours, theirs = pty.openpty()
    os.set_inheritable(theirs, True)
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=theirs, env=env) as process:
        os.close(theirs)
        found = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side has closed
                break
            if not part:
                break
            found += part
    os.close(ours)
    assert process.returncode == 0
    return found.decode()


def test_the_bar_shows_the_phase_and_the_tokens_per_second() -> None:
    told = in_terminal()
    assert "1/4" in told
    assert "weight sync" in told
    assert "1,206 tokens/s" in told


def test_without_a_terminal_there_is_one_line_a_step() -> None:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    ).stderr
    assert [line.strip() for line in told.splitlines() if line.strip()] == [
        "step   0/4  reward 0.500"
    ]


def test_the_innermost_phase_is_under_way() -> None:
    timers = Timers()
    seen = [timers.phase]
    with timers.timed("step"):
        with pytest.raises(ValueError, match="train"), timers.timed("train"):
            raise ValueError(timers.phase)
        seen.append(timers.phase)
    assert [*seen, timers.phase] == ["", "step", ""]
