"""Meters of the memory that this process has while a block runs, from inside. Linux only."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path
from types import TracebackType

import torch

EVERY_S = 0.0005
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2**20


class PeakMemory:
    """Context that reads the memory of its process again and again, in a thread.

    Pages of files are left out (only anonymous memory counts, RssAnon): the kernel takes them back
    when it needs memory, and several processes that map a file share them.
    """

    def __init__(self) -> None:
        self._before = self._largest = self._after = 0
        self._resident_before = self._resident = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    @property
    def peak_bytes(self) -> int:
        """Most memory of the block, above what the process had before it."""
        return self._largest - self._before

    @property
    def kept_bytes(self) -> int:
        """Memory that the process has after the block, above what it had before."""
        return self._after - self._before

    @property
    def resident_bytes(self) -> int:
        """Most memory of the block with the pages of mapped files, above what the process had
        before it: the kernel's own high-water mark, which misses nothing between two readings."""
        return self._resident - self._resident_before

    def __enter__(self) -> PeakMemory:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._resident_before = _status("VmRSS")
        self._before = self._largest = own_bytes()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._largest = max(self._largest, own_bytes())
        self._resident = _status("VmHWM")
        gc.collect()
        self._after = own_bytes()

    def _read(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._largest = max(self._largest, own_bytes())


class PeakDeviceMemory:
    """The same for the memory of GPU 0, by the books of PyTorch's allocator."""

    def __init__(self) -> None:
        self._before = self._largest = self._after = self._reserved = 0

    @property
    def peak_bytes(self) -> int:
        """Most memory of the block in tensors, above what there was before it."""
        return self._largest - self._before

    @property
    def kept_bytes(self) -> int:
        """Memory in tensors after the block, above what there was before."""
        return self._after - self._before

    @property
    def resident_bytes(self) -> int:
        """Most memory that the allocator held, gaps between tensors included."""
        return self._reserved

    def __enter__(self) -> PeakDeviceMemory:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.cuda.synchronize()
        self._largest = torch.cuda.max_memory_allocated()
        self._reserved = torch.cuda.max_memory_reserved()
        gc.collect()
        self._after = torch.cuda.memory_allocated()


def meter(platform: str) -> PeakMemory | PeakDeviceMemory:
    """Return the meter of the memory that models of a platform, `cpu` or `cuda`, live in."""
    return PeakDeviceMemory() if platform == "cuda" else PeakMemory()


def return_freed() -> None:
    """Let malloc return large buffers to the system when they are freed.

    By default the size from which it does so grows with the buffers, and those below leave gaps
    between others, which look like memory in use. A GPU's allocator fills its gaps.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def own_bytes() -> int:
    """Return the bytes of this process that are in memory and belong to no file."""
    _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(of_files)) * _PAGE


def _status(key: str) -> int:
    """Return a figure of the kernel about this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")
