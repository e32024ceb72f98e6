"""The processes that vLLM starts below this one."""

from __future__ import annotations

import contextlib

import psutil  # type: ignore[import-untyped]


def new_children(before: set[psutil.Process]) -> dict[psutil.Process, str]:
    """Processes below this one that were not there before, with a name each; Python's own tracker
    aside, which ends by itself and serves others too."""
    found = {}
    for child in set(psutil.Process().children(recursive=True)) - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(child.cmdline()):
                found[child] = f"process {child.pid} ({child.name()})"
    return found


def is_dead(process: psutil.Process) -> bool:
    """Whether it is gone, or waits to be reaped."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
