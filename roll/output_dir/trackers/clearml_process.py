"""The process in which clearml works: a JSON object a line comes from the run, ids go back.

The first line has the arguments of `Task.init` and the settings of the run, the others a step and
its record each. The end of the input completes the task.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

LEFT_ALONE_S = 60.0
"""Time that the last records get if the run has died, in seconds."""


def main() -> None:
    """Serve one session."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # clearml prints
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    first = json.loads(sys.stdin.readline())
    from clearml import Task

    task = Task.init(**first["init"])
    print(task.id, file=answers, flush=True)
    task.set_parameters_as_dict({"roll": first["settings"]})
    logger = task.get_logger()
    for line in sys.stdin:
        told = json.loads(line)
        for name, value in told["record"].items():
            _report(logger, name, value, told["step"])
    task.close()


def _report(logger: Any, name: str, value: float, step: int) -> None:
    """Report a metric; what its name has before the last `/` is the title of its plot."""
    title, _, series = name.rpartition("/")
    logger.report_scalar(title or series, series, value=value, iteration=step)


def _end_with(parent: int) -> None:
    """End this process some time after its parent, whatever clearml waits for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(LEFT_ALONE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
