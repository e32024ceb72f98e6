"""Profilers of PyTorch, which record what a process does inside the calls of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from roll.config.sections.lifecycle import ProfileKind

MAX_ALLOCATIONS = 1_000_000
"""Number of newest allocations that a snapshot holds."""


class Profiler(Protocol):
    """A profiler that records now."""

    def end(self, folder: Path, name: str) -> None:
        """End it, and write its record into `folder`, into a file that begins with `name`."""
        ...


def begin_profiler(kind: ProfileKind) -> Profiler:
    """Begin to record what this process does, in the thread that calls this."""
    return _Operators() if kind == "torch" else _Allocations()


class _Operators:
    """Profiler of operators and kernels."""

    def __init__(self) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile: Any = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.start()

    def end(self, folder: Path, name: str) -> None:
        self._profile.stop()
        folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"{name}.json.gz"))


class _Allocations:
    """Profiler of GPU memory."""

    def __init__(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def end(self, folder: Path, name: str) -> None:
        import torch

        folder.mkdir(parents=True, exist_ok=True)
        dump: Any = torch.cuda.memory._dump_snapshot
        dump(str(folder / f"{name}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
