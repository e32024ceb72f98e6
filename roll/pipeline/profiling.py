"""`StepProfiler`: records single steps of a run, which worker does what when (`profile`)."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate

from roll.config.run import RunConfig
from roll.config.sections.roles import Role
from roll.core.errors import ConfigError, RollError
from roll.core.timing import Span, Timers
from roll.distributed.cluster import Cluster, Launcher, P, Placement, W
from roll.distributed.profilers import nsys_command
from roll.distributed.worker import Worker

logger = logging.getLogger(__name__)

DRIVER = "driver"
_WITHOUT_GPUS = {
    "memory": "profile.kind: memory records GPU memory, and there are no GPUs here",
    "nsys": "profile.kind: nsys records what GPUs do, and there are no GPUs here",
}
"""Messages about kinds that need GPUs."""


class StepProfiler:
    """Launcher that knows all clusters of a run, and records the steps that `profile` names.

    Each recorded step gets a folder with `timeline.json.gz`: a Chrome trace of the phases of the
    driver and of the calls of all workers, for https://ui.perfetto.dev. What is recorded inside a
    worker lies beside it, under the worker's name. Times are those of each machine's clock.

    Args:
        launcher: starts the clusters.
        folder: folder of all recorded steps.
    """

    def __init__(self, config: RunConfig, launcher: Launcher, folder: Path, platform: str) -> None:
        """Check that the platform has what is to be recorded; ConfigError if not."""
        self._profile = config.profile
        self._launcher = launcher
        self._folder = folder
        self._clusters: list[Cluster[Any]] = []
        if config.profile is not None and platform != "cuda":
            said = _WITHOUT_GPUS.get(config.profile.kind)
            if said is not None:
                raise ConfigError(said)

    def start(
        self,
        worker_cls: Callable[Concatenate[Any, P], W],
        placement: Placement,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Cluster[W]:
        """Start a cluster; see `Launcher.start`."""
        placement = self._under_nsys(placement)
        cluster: Cluster[W] = self._launcher.start(worker_cls, placement, *args, **kwargs)
        self._clusters.append(cluster)
        return cluster

    def clusters(self) -> dict[str, Cluster[Any]]:
        """Return the clusters that were started, by the keys under which `profile.roles` names
        their roles."""
        return {_key(one.role, one.label): one for one in list(self._clusters)}

    @contextmanager
    def step(self, step: int, timers: Timers) -> Iterator[None]:
        """Record the step that runs inside the block, if `profile` names it.

        Args:
            timers: timers of the driver's phases.
        """
        if self._profile is None or step not in self._profile.steps:
            yield
            return
        folder = self._folder / f"step_{step:06d}"
        self._each(lambda cluster, rank: (Worker.begin_profile, self._kind(cluster, rank)))
        timers.spans.begin()
        yield
        spans = {DRIVER: timers.spans.end()}
        spans |= self._each(lambda *_: (Worker.end_profile, folder))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with gzip.open(folder / "timeline.json.gz", "wt", encoding="utf-8") as file:
                json.dump(chrome_trace(spans), file)
        except OSError as error:  # such as a full disk; the step itself is done
            logger.warning("step %d is not recorded in %s: %s", step, folder, error)
        else:
            logger.info("step %d is recorded in %s", step, folder)

    def _under_nsys(self, placement: Placement) -> Placement:
        """Return a placement whose workers are started under Nsight Systems where it is to record
        them; ConfigError: it is not installed."""
        profile = self._profile
        if profile is None or profile.kind != "nsys":
            return placement
        if _key(placement.role, placement.label) not in profile.roles:
            return placement
        self._folder.mkdir(parents=True, exist_ok=True)
        names = {rank: f"{placement.name}[{rank}]" for rank in profile.ranks}
        under = {rank: nsys_command(self._folder, name) for rank, name in names.items()}
        return replace(placement, under=under)

    def _kind(self, cluster: Cluster[Any], rank: int) -> str | None:
        """Return what is recorded inside a worker; None: nothing."""
        assert self._profile is not None
        wanted = _key(cluster.role, cluster.label) in self._profile.roles
        return self._profile.kind if wanted and rank in self._profile.ranks else None

    def _each(self, call: Callable[[Cluster[Any], int], tuple[Any, Any]]) -> dict[str, Any]:
        """Call a method with an argument on every worker that lives; return name of the worker ->
        result. A worker that dies meanwhile is left out."""
        pending = {}
        for cluster in self._clusters:
            for rank in range(cluster.world_size):
                if rank not in cluster.lost:
                    one = cluster.on([rank])
                    method, argument = call(cluster, rank)
                    pending[one.name] = one.submit(method, argument)
        found = {}
        for name, answer in pending.items():
            try:
                found[name] = answer.result()
            except RollError as error:
                logger.warning("%s is not recorded: %s", name, error)
        return found


def _key(role: Role, label: str) -> str:
    """Return the key under which `profile.roles` names a role."""
    return f"{role}s.{label}" if label else role


def chrome_trace(spans: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """Return a Chrome trace with a process for each name, and in it as many tracks as spans
    overlap.

    Args:
        spans: name of the driver or of a worker -> its spans.
    """
    events: list[dict[str, Any]] = []
    for process, (name, own) in enumerate(spans.items()):
        events.append(_named("process_name", process, name=name))
        events.append(_named("process_sort_index", process, sort_index=process))
        ends_s: list[float] = []
        """For each track, the end of its last span."""
        for span in sorted(own, key=lambda span: (span.begin_s, -span.end_s)):
            track = _track(ends_s, span)
            times = {"ts": 1e6 * span.begin_s, "dur": 1e6 * (span.end_s - span.begin_s)}
            events.append({"ph": "X", "name": span.name, "pid": process, "tid": track} | times)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track(ends_s: list[float], span: Span) -> int:
    """Return the first track that is free when a span begins, and occupy it."""
    for track, end_s in enumerate(ends_s):
        if end_s <= span.begin_s:
            ends_s[track] = span.end_s
            return track
    ends_s.append(span.end_s)
    return len(ends_s) - 1


def _named(what: str, process: int, **args: Any) -> dict[str, Any]:
    """Return an event that sets a name or place of a process."""
    return {"ph": "M", "name": what, "pid": process, "args": args}
