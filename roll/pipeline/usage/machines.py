"""`Machines`: looks at the workers and machines of a run from time to time, in a thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from roll.core.errors import RollError
from roll.core.metrics import Last, Max, Mean, Metric, Metrics
from roll.distributed.cluster import Cluster
from roll.distributed.pending import Pending
from roll.distributed.worker import Worker
from roll.platform.machine import GIB
from roll.platform.processes import rss_bytes
from roll.platform.usage import GpuUse, MachineUse, WorkerUse, free_gb, rates, use_of_machine

logger = logging.getLogger(__name__)

EVERY_S = 5.0
"""Shortest time between two looks, in seconds. A look at three workers and the driver takes 20 ms
of CPU time, for which both threads of a policy wait that trains on two cores."""
REST = 19
"""Number of times as long as a look took that no other follows: it takes 5 % of a core at most."""
ANSWER_S = 10.0
"""Longest wait of a look for all workers, in seconds."""
SLICE_S = 0.2
"""Time after which a wait looks whether the watch has ended, in seconds."""

Place = tuple[str, str]
"""Name of a metric, and the machine, GPU or worker that the number is of."""


class Machines:
    """Watch over memory, cores, GPUs, network and disks of a run. It runs while it is entered.

    Args:
        clusters: returns the clusters of the run, by the keys of their roles.
        folder: folder of the run, of whose disk the free space is told.
    """

    def __init__(self, clusters: Callable[[], Mapping[str, Cluster[Any]]], folder: Path) -> None:
        self._clusters = clusters
        self._folder = folder
        self._lock = threading.Lock()
        """Lock of what was found."""
        self._looking = threading.Lock()
        """Lock that a look takes: only one at a time."""
        self._found: dict[Place, Metric] = {}
        self._latest = Metrics()
        self._before: dict[str, MachineUse] = {}
        """Machine -> its use at the look before."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="roll-machines", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(ANSWER_S)

    def take(self) -> Metrics:
        """Return what was seen since the last call: the largest memory and rates, and means of the
        utilisation of GPUs. In a step without a look it is what was seen last."""
        if not self._latest and not self._found:
            self.look()
        with self._lock:
            found, self._found = self._found, {}
        if found:
            self._latest = summed(found)
        return self._latest

    def look(self) -> None:
        """Look at all workers and machines. A cluster of which a worker is lost is left out."""
        with self._looking:
            found = dict(self._seen())
        with self._lock:
            for place, metric in found.items():
                before = self._found.get(place)
                self._found[place] = metric if before is None else before.merge(metric)

    def _watch(self) -> None:
        """Look again and again, until the watch ends."""
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            begun_s = time.perf_counter()
            try:
                self.look()
            except Exception:
                logger.exception("the machines of the run are not watched any more")
                return
            pause_s = max(EVERY_S, REST * (time.perf_counter() - begun_s))

    def _seen(self) -> Iterator[tuple[Place, Metric]]:
        """Yield what is seen now."""
        machines: dict[str, MachineUse] = {}
        gpus: dict[str, GpuUse] = {}
        largest = 0.0
        for role, workers in self._asked():
            sizes = [one.resident / GIB for one in workers]
            largest = max(largest, *sizes)
            yield (f"memory/{role}/gb_max", ""), Max(max(sizes))
            yield (f"memory/{role}/gb_sum", ""), Max(sum(sizes))
            own = [gpu for one in workers for gpu in one.gpus]
            yield from _of_process(role, own)
            gpus |= {f"{gpu.machine} {gpu.number}": gpu for gpu in own}
            machines |= {one.machine.machine: one.machine for one in workers}
        here = use_of_machine()  # last: its control group is that of the whole run
        machines[here.machine] = here
        yield ("memory/driver_gb", ""), Max(rss_bytes(os.getpid()) / GIB)
        yield ("memory/rss_gb_max", ""), Max(largest)
        free = free_gb(self._folder)
        if free is not None:
            yield ("machine/disk_free_gb", ""), Last(free)
        for name, machine in machines.items():
            for metric, value in _of_machine(machine, self._before.get(name)):
                yield (metric, name), Max(value)
        for name, gpu in gpus.items():
            yield from _of_gpu(name, gpu)
        self._before = machines

    def _asked(self) -> Iterator[tuple[str, list[WorkerUse]]]:
        """Ask all workers at once; yield the answers of each cluster that come in time."""
        asked = {}
        deadline = time.monotonic() + ANSWER_S
        for role, cluster in self._clusters().items():
            if not cluster.lost and not self._ended.is_set():
                asked[role] = cluster.beside(Worker.usage)
        for role, answer in asked.items():
            try:
                if self._comes(answer, deadline):
                    yield role, answer.result()
            except RollError:  # lost just now: others tell that
                continue

    def _comes(self, answer: Pending[list[WorkerUse]], deadline: float) -> bool:
        """Wait for an answer until the deadline or the end of the watch; return whether it came.

        Raises:
            RollError: a worker of the cluster is lost.
        """
        while not answer.poll(SLICE_S):
            if self._ended.is_set() or time.monotonic() > deadline:
                return False
        return True


def _of_process(role: str, gpus: list[GpuUse]) -> Iterator[tuple[Place, Metric]]:
    """Yield what the workers of a role have on their GPUs, as PyTorch's books say."""
    for name in ("allocated", "reserved", "largest"):
        sizes = [size for gpu in gpus if (size := getattr(gpu, name)) is not None]
        if sizes:
            yield (f"gpu/{role}/{name}_gb", ""), Max(max(sizes) / GIB)


def _of_machine(now: MachineUse, before: MachineUse | None) -> Iterator[tuple[str, float]]:
    """Yield the metrics of a machine."""
    yield "machine/memory_used_gb", now.memory_used / GIB
    yield "machine/memory_total_gb", now.memory_total / GIB
    if now.group_used is not None and now.group_limit is not None:
        yield "machine/container_used_gb", now.group_used / GIB
        yield "machine/container_limit_gb", now.group_limit / GIB
    if before is not None and now.at_s > before.at_s:
        for name, value in rates(before, now).items():
            yield f"machine/{name}", value


def _of_gpu(name: str, gpu: GpuUse) -> Iterator[tuple[Place, Metric]]:
    """Yield what is seen of a GPU as a whole."""
    if gpu.utilisation is not None:
        yield (UTILISATION, name), Mean(gpu.utilisation)
    if gpu.used is not None:
        yield ("gpu/memory_used_gb", name), Max(gpu.used / GIB)
    if gpu.total is not None:
        yield ("gpu/memory_total_gb", name), Max(gpu.total / GIB)


UTILISATION = "gpu/utilisation"


def summed(found: Mapping[Place, Metric]) -> Metrics:
    """Return one number for each name: the largest of all machines or GPUs. Of several there is the
    smallest, too, as `<name>_min`; of the utilisation of GPUs the mean is told in place of the
    largest."""
    values: dict[str, list[float]] = {}
    for (name, _), metric in found.items():
        values.setdefault(name, []).append(metric.value())
    told: dict[str, Metric] = {}
    for name, own in values.items():
        told[name] = Last(sum(own) / len(own) if name == UTILISATION else max(own))
        if len(own) > 1:
            told[f"{name}_min"] = Last(min(own))
    return Metrics(told)
