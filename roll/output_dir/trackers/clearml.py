"""ClearML, whose package gets a process of its own.

`Task.init` takes over `os.fork`, signals and the end of the process in which it is called, and
whoever calls `Task.close` waits, with a server that does not answer for ever. In a process of its
own none of it is the run's: a process that does not end in time is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from roll.output_dir.trackers.interface import Record, TrackedRun

CLOSE_TIMEOUT_S = 50.0
"""Time for the last records, in seconds; less than that of `Behind`, which closes trackers."""
OFFLINE = "offline-"
"""Begin of the ids of sessions that are kept on disk (`CLEARML_OFFLINE_MODE=1`)."""


class ClearmlTracker:
    """Tracker that sends the metrics to a ClearML server."""

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        """Begin a task in the project `run.project`, or go on with that of the earlier sessions;
        `kwargs` are those of `Task.init`. A session that is kept on disk is a task of its own.

        Raises:
            RuntimeError: the process ended, such as for lack of a server.
        """
        known = run.recall()
        if known is not None and known.startswith(OFFLINE):
            known = None
        init = {
            "project_name": run.project,
            "task_name": run.name,
            "reuse_last_task_id": known or False,
            # Steps keep their numbers; else they would be counted from the last one on.
            "continue_last_task": False if known is None else 0,
            # It would look through the user's repository for minutes, and `close` waits for it.
            "auto_connect_frameworks": {"detect_repository": False},
            "auto_connect_arg_parser": False,
            "auto_connect_streams": False,
            "auto_resource_monitoring": False,
            **kwargs,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.clearml_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is the run's
        )
        assert self._process.stdout is not None
        self._send({"init": init, "settings": run.config})
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"clearml's process ended with code {self._process.wait()}")
        run.remember(answer.strip())

    def log(self, step: int, record: Record) -> None:
        self._send({"step": step, "record": dict(record)})

    def close(self) -> None:
        """Have the last records sent, and the task completed.

        Raises:
            RuntimeError: the process failed.
            TimeoutError: it took longer than `CLOSE_TIMEOUT_S`, and was killed.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise TimeoutError(
                f"clearml has not sent everything within {CLOSE_TIMEOUT_S:g} s, and was killed"
            ) from None
        if code:
            raise RuntimeError(f"clearml's process ended with code {code}")

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
