"""Meters of a driver: CPU time and bytes by the part of a step, and peaks of memory and store."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from roll.core.metrics import Last, Metrics
from roll.core.timing import Timers
from roll.core.types import WorkerSpec
from roll.distributed.worker import Worker
from roll.pipeline.agentic import AgenticPipeline

PARTS = ("receive", "assemble", "score", "advantages", "train", "rest")
"""Parts of a step, which together take all its time. `assemble` makes the metrics of the rollout
and the batch; `rest` is what lies outside the other parts, such as the push of weights."""
INSIDE = {"rollout": "receive", "logprob": "score", "train": "train"}
"""Timed phase of the pipeline -> the part that it is."""
BEFORE = {"logprob": "assemble", "train": "advantages"}
"""Timed phase -> the part that lies between the phase before it and this one."""
POLL_S = 0.02
RELEASE_LOOKS = 100
"""Number of readings, `POLL_S` apart, after which what is in the store counts as left there."""
BUSY_AFTER_S = 2.0
"""Time in which the processes that keep the cores busy start, in seconds."""
STORE_EVERY = 5
"""Number of readings of the driver's memory per reading of the store, which takes a call."""


BUSY = "import numpy\na = numpy.zeros(1 << 23)\nwhile True: a += 1.0"
"""Program that computes for ever, on more memory than a cache holds."""


def waiting_rate(seconds: float) -> float:
    """Return the CPU time of this process in each second in which nothing happens: heartbeats of
    the workers, and Ray's own threads.

    All cores compute meanwhile, as they do in a step in which the driver waits: a process that
    seldom runs then finds nothing of its own in the caches.

    Args:
        seconds: time for which to measure.
    """
    command = [sys.executable, "-c", BUSY]
    busy = [subprocess.Popen(command) for _ in range(len(os.sched_getaffinity(0)))]
    try:
        time.sleep(BUSY_AFTER_S)
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        return (time.process_time() - begun_cpu_s) / (time.perf_counter() - begun_s)
    finally:
        for each in busy:
            each.kill()
            each.wait()


class PartTimers(Timers):
    """Timers of a pipeline that also add up the CPU time of this process (all threads) by part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = "rest"
        """Part that runs now, as far as it is a timed phase."""
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        """Part -> CPU time since `begin`, in seconds."""
        self._since_s = 0.0

    def begin(self) -> None:
        """Begin to count a step."""
        self.cpu_s.clear()
        self._since_s = time.process_time()

    def end(self) -> None:
        """End the step: what has not been counted belongs to `rest`."""
        self._count("rest")

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Time a phase as `Timers` does, and count the CPU time before it and inside it."""
        self._count(BEFORE.get(phase, "rest"))
        self.part = INSIDE.get(phase, "rest")
        try:
            with super().timed(phase):
                yield
        finally:
            self._count(self.part)
            self.part = "rest"

    def _count(self, part: str) -> None:
        now_s = time.process_time()
        self.cpu_s[part] += now_s - self._since_s
        self._since_s = now_s


class MeteredAgents(AgenticPipeline):
    """`pipeline: agentic` with the metrics `driver/PART_cpu_s`: CPU time of the driver in a step.
    A run file names it as `pipeline`."""

    def open(self) -> None:
        self.timers = self._parts = PartTimers()
        super().open()

    def step(self, step: int) -> Metrics:
        self._parts.begin()
        metrics = super().step(step)
        self._parts.end()
        spent = {f"driver/{part}_cpu_s": Last(s) for part, s in self._parts.cpu_s.items()}
        return metrics | Metrics(spent)


@dataclass
class Border:
    """Counter of the bytes that the driver serializes for workers and reads from them.

    It counts values at Ray's serialization in this process: every argument of a call and every
    `ray.put` when they are written, every result when it is read. A value that stays in the store,
    of which the driver has a reference only, counts as the bytes of the reference. What messages
    of Ray hold besides these values is not counted.
    """

    part: Callable[[], str]
    """Function that names the part of the step that runs now."""
    sent: Counter[str] = field(default_factory=Counter)
    """Part -> bytes written."""
    received: Counter[str] = field(default_factory=Counter)
    """Part -> bytes read."""
    unpickle_cpu_s: float = 0.0
    """CPU time in which results were made of the bytes read, in seconds."""
    pickle_cpu_s: float = 0.0
    """CPU time in which arguments were turned into bytes, in seconds; without their copy to the
    store."""

    def begin(self) -> None:
        """Begin to count a step."""
        self.sent.clear()
        self.received.clear()
        self.unpickle_cpu_s = self.pickle_cpu_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count inside the block. Ray must run; without it nothing is counted.

        Ray has no hook at this place, so two methods of its serialization context are wrapped.
        """
        if not ray.is_initialized():
            yield
            return
        context: Any = ray._private.worker.global_worker.get_serialization_context()
        write, read = context.serialize, context.deserialize_objects
        context.serialize = lambda value: self._write(write, value)
        context.deserialize_objects = lambda found, *rest: self._read(read, found, *rest)
        try:
            yield
        finally:
            del context.serialize, context.deserialize_objects

    def _write(self, write: Callable[[Any], Any], value: Any) -> Any:
        begun_s = time.thread_time()
        written = write(value)
        self.pickle_cpu_s += time.thread_time() - begun_s
        self.sent[self.part()] += written.total_bytes
        return written

    def _read(self, read: Callable[..., Any], found: Sequence[Any], *rest: Any) -> Any:
        size = sum(
            len(buffer) for data, metadata, _ in found for buffer in (data, metadata) if buffer
        )
        self.received[self.part()] += size
        begun_s = time.thread_time()
        values = read(found, *rest)
        self.unpickle_cpu_s += time.thread_time() - begun_s
        return values


@dataclass(frozen=True, slots=True)
class Peaks:
    """Largest sizes in one step, in bytes."""

    anonymous: int
    """Memory of the driver that belongs to no file and is not shared."""
    resident: int
    """Resident memory of the driver, with pages that it shares, such as those of the store."""
    store: int
    """Objects in Ray's object store."""
    spilled: int
    """Bytes that Ray has moved from the store to disk, from its start on."""
    left: int = 0
    """Objects in the store after the step, in which nobody generates ahead."""


class Observer(Worker):
    """A worker that watches the driver and Ray's store from outside, so that the driver's CPU time
    has no part in it."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._anonymous = self._store = self._spilled = 0

    def begin(self, pid: int) -> None:
        """Begin to watch the process `pid`."""
        self._pid = pid
        self._anonymous = self._store = self._spilled = 0
        self._ending.clear()
        with suppress(PermissionError):  # then the peak is that of the process, not of the step
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> Peaks:
        """Stop watching; return the peaks since `begin`."""
        assert self._thread is not None, "begin comes first"
        self._ending.set()
        self._thread.join()
        return Peaks(self._anonymous, self._size("VmHWM"), self._store, self._spilled, _left())

    def _watch(self) -> None:
        look = store_reader()
        readings = 0
        while not self._ending.wait(POLL_S if readings else 0):
            self._anonymous = max(self._anonymous, self._size("RssAnon"))
            if readings % STORE_EVERY == 0:
                used, self._spilled = look()
                self._store = max(self._store, used)
            readings += 1

    def _size(self, name: str) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def _left() -> int:
    """Return the bytes in the store, as soon as they do not become fewer, since Ray learns a little
    later that nobody needs a value."""
    look, left = store_reader(), 0
    for _ in range(RELEASE_LOOKS):
        left, _spilled = look()
        if not left:
            break
        time.sleep(POLL_S)
    return left


def store_reader() -> Callable[[], tuple[int, int]]:
    """Return a function that asks this node's raylet for the bytes in its store, and for those that
    it has spilled; without Ray both are 0."""
    if not ray.is_initialized():
        return lambda: (0, 0)
    from ray._private.internal_api import node_stats

    here = ray.get_runtime_context().get_node_id()
    (node,) = (each for each in ray.nodes() if each["NodeID"] == here)

    def look() -> tuple[int, int]:
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        stats = node_stats(*address, include_memory_info=False).store_stats
        return stats.object_store_bytes_used, stats.spilled_bytes_total

    return look
