"""Profilers, which record what a process does inside the calls of a worker: those of PyTorch, and
NVIDIA Nsight Systems (`nsys`), which starts the process."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any, Protocol

from roll.config.sections.lifecycle import ProfileKind
from roll.core.errors import ConfigError, WaitTimeoutError

MAX_ALLOCATIONS = 1_000_000
"""Number of newest allocations that a snapshot holds."""
REPORT_TIMEOUT_S = 300.0
"""Time limit for the report of Nsight Systems on a step, in seconds."""
_POLL_S = 0.5
_REPORT = ".nsys-rep"


class Profiler(Protocol):
    """A profiler that records now."""

    def end(self, folder: Path, name: str) -> None:
        """End it, and write its record into `folder`, into a file that begins with `name`."""
        ...


def begin_profiler(kind: ProfileKind) -> Profiler:
    """Begin to record what this process does, in the thread that calls this."""
    match kind:
        case "torch":
            return _Operators()
        case "memory":
            return _Allocations()
        case "nsys":
            return _Nsight()


def nsys_command(folder: Path, name: str) -> tuple[str, ...]:
    """Return the command that starts a worker under Nsight Systems, without that of the worker.

    It records nothing until the worker says so, and writes a report each time the worker ends it.

    Args:
        folder: existing folder for the reports.
        name: name of the worker.

    Raises:
        ConfigError: Nsight Systems is not installed.
    """
    escaped = str(folder / name).replace("%", "%%")
    return (
        find_nsys(),
        "profile",
        "--trace=cuda,nvtx,cudnn,cublas",
        # Samples of the CPU need rights that containers seldom have.
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=repeat",
        "--kill=none",
        "--force-overwrite=true",
        f"--output={escaped}-%p",
    )


def find_nsys() -> str:
    """Return the path of the command `nsys`; ConfigError: it is not installed."""
    found = shutil.which("nsys")
    if found is None:
        raise ConfigError(
            "profile.kind: nsys needs NVIDIA Nsight Systems, and there is no command nsys here; "
            "install it on every node (package nsight-systems-cli of NVIDIA's repositories, or "
            "https://developer.nvidia.com/nsight-systems), and add its folder to PATH"
        )
    return found


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


class _Nsight:
    """Nsight Systems, under which this process was started (`nsys_command`)."""

    def __init__(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was asked for before belongs to no recorded step
            start: Any = torch.cuda.profiler.start
            start()

    def end(self, folder: Path, name: str) -> None:
        """End the recording, and move its report; see `Profiler.end`.

        Raises:
            WaitTimeoutError: there is no report in time.
        """
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            stop: Any = torch.cuda.profiler.stop
            stop()
        report = _finished_report(folder.parent, f"{name}-{os.getpid()}.")
        folder.mkdir(parents=True, exist_ok=True)
        report.rename(folder / f"{name}{_REPORT}")


def _finished_report(folder: Path, begin: str) -> Path:
    """Wait for a report whose name begins so, until it does not grow any more; return its path.

    Raises:
        WaitTimeoutError: it does not come within `REPORT_TIMEOUT_S`.
    """
    deadline, size = time.monotonic() + REPORT_TIMEOUT_S, 0
    while time.monotonic() < deadline:
        for path in folder.iterdir():
            if path.name.startswith(begin) and path.suffix == _REPORT:
                before, size = size, path.stat().st_size
                if size > 0 and size == before:
                    return path
        time.sleep(_POLL_S)
    raise WaitTimeoutError(
        f"waited {REPORT_TIMEOUT_S:g} s for {folder / begin}*{_REPORT}; nsys says in the worker's "
        "output why it has written none"
    )
