"""`SampleKeeper`: has a worker write the samples of a run into files; the run does not wait."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from roll.config.rlvr_base import RlvrBase
from roll.config.sections.roles import Role
from roll.core.errors import RollError, WorkerLostError
from roll.core.metrics import Metrics, Sum
from roll.core.pickling import Columns
from roll.core.types import Prompt
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.models.load import load_config
from roll.models.vocabulary import token_hash
from roll.output_dir.sample_files import Origin, Split
from roll.rollout.types import Group, ScoredSample
from roll.runtime.run_data import RunData
from roll.workers.sample_writer.worker import SampleJob, SampleWriter

logger = logging.getLogger(__name__)

MAX_WAITING = 4
"""Largest number of files that wait to be written. Their tokens are in the object store."""
WRITE_TIMEOUT_S = 600.0
"""Time limit for one file, in seconds."""
SETTLE_TIMEOUT_S = 60.0
"""Time that a checkpoint waits for the files of the steps before it, in seconds."""
CLOSE_TIMEOUT_S = 10.0
"""Time that the end of a run waits for its last files, in seconds."""


class SampleKeeper:
    """Hands samples to the worker that writes them, in a thread of its own.

    What goes wrong (a full disk, a dead worker, a disk that hangs) costs files, not the run: the
    first time is a warning, and all samples that have no file are counted.
    """

    def __init__(
        self, cluster: Cluster[SampleWriter], *, training: bool, write_timeout_s: float
    ) -> None:
        """Start the thread.

        Args:
            cluster: one worker, which is replaceable.
            training: whether samples of steps are kept, too, and not of validations alone.
            write_timeout_s: time limit for one file, in seconds.
        """
        self._cluster = cluster
        self._training = training
        self._write_timeout_s = write_timeout_s
        self._jobs: list[SampleJob] = []
        """Jobs that are not done, the one under way first."""
        self._changed = threading.Condition()
        self._not_kept = 0
        self._warned = self._hangs = self._closed = False
        threading.Thread(target=self._work, name="roll-samples", daemon=True).start()

    def keep_step(self, step: int, groups: Sequence[Group]) -> None:
        """Have the samples of a step written, if the run keeps those of steps."""
        if self._training:
            self._keep(step, "train", [(None, groups)])

    def keep_validation(self, step: int, sets: Mapping[str, Sequence[Group]]) -> None:
        """Have the samples of the validation after `step` steps written, by set."""
        self._keep(step, "validation", list(sets.items()))

    def _keep(
        self, step: int, split: Split, sets: Sequence[tuple[str | None, Sequence[Group]]]
    ) -> None:
        """Queue the samples of a file; leave them out if too many files wait."""
        of = [(name, group) for name, groups in sets for group in groups for _ in group.samples]
        job = SampleJob(
            step,
            split,
            Columns(slim(group for _, groups in sets for group in groups)),
            sets=[name for name, _ in of],
            baselines=[baseline_reward(group) for _, group in of],
        )
        with self._changed:
            if len(self._jobs) < MAX_WAITING:
                self._jobs.append(job)
                self._changed.notify_all()
                return
        self._lose(job, f"{MAX_WAITING} earlier files are not written yet")

    def settle(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until all files are written; when time is up, warn and go on. As long as no file is
        done after that, further calls do not wait again."""
        with self._changed:
            if not self._hangs and not self._changed.wait_for(lambda: not self._jobs, timeout_s):
                self._hangs = True
                logger.warning(
                    "%d files of samples are not written after %g s; the run goes on",
                    len(self._jobs),
                    timeout_s,
                )

    def take_metrics(self) -> Metrics:
        """Return the number of samples without a file since the last call, if there are any."""
        with self._changed:
            count, self._not_kept = self._not_kept, 0
        return Metrics({"samples/not_kept": Sum(count)} if count else {})

    def close(self) -> None:
        """Wait a while for the last files, and end the thread."""
        self.settle(CLOSE_TIMEOUT_S)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        """Have one job after the other done, until the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
            self._do_first()
            with self._changed:
                # No local name holds the job: its tokens would stay in the object store.
                del self._jobs[0]
                self._hangs = False
                self._changed.notify_all()

    def _do_first(self) -> None:
        """Have the first job done; a worker that dies of it is replaced, and tries once more."""
        job = self._jobs[0]
        try:
            try:
                failed = self._ask(job)
            except WorkerLostError:
                failed = self._ask(job)
        except RollError as error:
            failed = str(error)
        except Exception as error:  # noqa: BLE001 - a named boundary: files are not worth a run
            failed = repr(error)
        if failed is not None and not self._closed:
            self._lose(job, failed)

    def _ask(self, job: SampleJob) -> str | None:
        """Have the worker write a file; return why it could not. RollError: it died or is late."""
        if self._cluster.lost:
            self._cluster.restart(0)
        return self._cluster.submit(SampleWriter.write, job).result(self._write_timeout_s)

    def _lose(self, job: SampleJob, why: str) -> None:
        """Count the samples of a job that has no file, and warn if it is the first one."""
        with self._changed:
            self._not_kept += len(job.samples)
            warned, self._warned = self._warned, True
        if not warned:
            logger.warning(
                "the %d samples of %s %d are not kept (%s); the run goes on, and counts further "
                "ones as samples/not_kept",
                len(job.samples),
                "step" if job.split == "train" else "validation",
                job.step,
                why,
            )


def start_keeper(
    config: RlvrBase, launcher: Launcher, data: RunData[Prompt]
) -> SampleKeeper | None:
    """Start the worker that writes samples; None if the run keeps none."""
    kept = config.track.samples
    if kept == "none" or (kept == "validation" and not config.validation.sets):
        return None
    place = Placement(Role.SAMPLES, pool=None, workers=1, replaceable=True)
    origin = Origin(
        tokenizer=token_hash(data.tokenizer),
        model_type=load_config(config.train_model).model_type,
        pictures=any(prompt.pictures for prompt in data.train.in_memory),
    )
    output_dir = Path(config.output_dir)
    cluster = launcher.start(SampleWriter, place, output_dir, config.train_model, origin)
    return SampleKeeper(cluster, training=kept == "all", write_timeout_s=WRITE_TIMEOUT_S)


def baseline_reward(group: Group) -> float | None:
    """Return the reward of the greedy response of a group, as `SampleJob` has it."""
    if group.baseline is None:
        return None
    return group.baseline.total if group.baseline.has_reward else math.nan


def slim(groups: Iterable[Group]) -> Iterator[ScoredSample]:
    """Return an iterator over the samples of groups without what no file has: further columns of
    the data row, and patches of pictures, which would stay in the object store."""
    for group in groups:
        slim: dict[int, Prompt] = {}
        for scored in group.samples:
            if not any(row.prompt.extra or row.prompt.pictures for row in scored.rows):
                yield scored
                continue
            rows = []
            for row in scored.rows:
                prompt = row.prompt
                known = slim.get(id(prompt))
                if known is None:
                    known = slim[id(prompt)] = replace(prompt, extra={}, pictures=None)
                rows.append(replace(row, prompt=known))
            yield replace(scored, sample=rows[0], branches=tuple(rows[1:]))
