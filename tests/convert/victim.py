"""Conversions that end before their time, one after the other, each in a process of its own.

Reads cases as JSON from its first argument and prints how each ended: no torch, so that a case
takes as long as a fork.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_adapter.convert import commands
from mcore_adapter.convert.conversions import Settings
from mcore_adapter.errors import McoreAdapterError
from mcore_adapter.parallel_sizes import ParallelSizes

WORKERS_S = 10
"""For workers to be gone, once the process that started them is."""


def ending(case: dict[str, Any]) -> Callable[[int], None]:
    """Sends the signal of a case, if it has one, when so many tensors are done."""
    left = case["at"]

    def progress(num_bytes: int) -> None:
        nonlocal left
        left -= 1
        if left == 0 and case["signal"]:
            os.kill(os.getpid(), case["signal"])

    return progress


def convert(case: dict[str, Any]) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if case["full_after"] is not None:
        os.environ["FULL_AFTER"] = str(case["full_after"])
    if case["no_locks"] is not None:
        os.environ["NO_LOCKS"] = str(case["no_locks"])
    if case["at"] == 0 and case["signal"]:
        # As soon as the first worker is there, which nobody knows of yet.
        me = os.getpid()
        os.register_at_fork(after_in_parent=lambda: os.kill(me, case["signal"]))
    how = Settings(workers=case["workers"], progress=ending(case))
    layers = case["layers"]
    sizes = ParallelSizes(**case["sizes"], layers=None if layers is None else tuple(layers))
    try:
        commands.to_mcore(Path(case["src"]), Path(case["dst"]), sizes, how)
    except McoreAdapterError as error:
        sys.stdout.write(f"refused: {error}\n")
        return 3
    except KeyboardInterrupt:
        return 130
    return 0


def main() -> None:
    for case in json.loads(Path(sys.argv[1]).read_text()):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            code = 1
            try:
                code = convert(case)
            except BaseException:  # noqa: BLE001 - whatever it is, it is told
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        deadline = time.monotonic() + WORKERS_S
        while (workers := _alive(child)) and time.monotonic() < deadline:
            time.sleep(0.01)
        sys.stdout.write(json.dumps({"ended": os.waitstatus_to_exitcode(status), "alive": workers}))
        sys.stdout.write("\n")


def _alive(group: int) -> int:
    """Processes of a group that are left, those aside that have just been killed."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return 0
    return sum(
        f") {state} " in text and text.rpartition(") ")[2].split()[2] == str(group)
        for text in _stats()
        for state in "RSDT"
    )


def _stats() -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        try:
            found.append((process / "stat").read_text() if process.name.isdigit() else "")
        except OSError:
            continue
    return found


if __name__ == "__main__":
    main()
