"""`Saves`: how the states of a run get into its checkpoints, at once or beside the next steps."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from roll.core.errors import WaitTimeoutError
from roll.core.threads.write_thread import Written
from roll.distributed.cluster import Cluster
from roll.output_dir.checkpoints import Checkpoints, Draft, RunState, require_written
from roll.output_dir.upload import Uploads
from roll.workers.model import TrainWorker

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 0.02
LAST_LOOK_S = 1.0
"""Shortest and longest time between two looks at a write, in seconds."""


class Saves:
    """Writer of a run's checkpoints, of which at most one is under way at a time.

    A context manager around the steps: at the end of its block it waits for the last checkpoint,
    also after an error or Ctrl-C. A further Ctrl-C gives the checkpoint up.
    """

    def __init__(self, checkpoints: Checkpoints, limit_s: float) -> None:
        """Begin without a write.

        Args:
            limit_s: time without a further byte after which a write beside the steps has failed, in
                seconds.
        """
        self._checkpoints = checkpoints
        self._limit_s = limit_s
        self._optimizer = checkpoints.config.optimizer
        self._beside = False
        """True while states are taken that are written beside the next steps."""
        self._begun: list[tuple[Cluster[Any], Path]] = []
        """Clusters that have begun to write, and their folders."""
        self._write: _Write | None = None
        self._uploads: Uploads | None = None
        if checkpoints.config.upload is not None:
            uploads = self._uploads = Uploads(checkpoints.config.upload, limit_s=limit_s)
            checkpoints.held = lambda: uploads.held

    def save(
        self, state: RunState, states: Callable[[Path], None], config: Path, *, at_once: bool
    ) -> None:
        """Write a checkpoint, after the last one is complete. With `checkpoint.asynchronous` only
        the copies of the states are made here.

        Args:
            states: function that calls `save_role` for each role that trains, with a subfolder of
                the folder that it gets.
            config: the run's `config.yaml`, of which the checkpoint has a copy.
            at_once: return when the checkpoint is complete.

        Raises:
            CheckpointError, WorkerError, OSError: it could not be written, or the last one could
                not.
            WaitTimeoutError: the last one has stopped growing.
        """
        self.wait()
        self._beside = self._checkpoints.config.asynchronous and not at_once
        self._begun = []
        with self._checkpoints.drafted(state) as draft:
            states(draft.folder)
            (draft.folder / "config.yaml").write_bytes(config.read_bytes())
        if self._beside:
            self._write = _Write(self._complete, draft, self._begun, self._limit_s)
        else:
            self._complete(draft)

    def save_role(self, cluster: Cluster[Any], folder: Path) -> None:
        """Have a cluster write its states into `folder`, or copy them and begin to write.

        Raises:
            CheckpointError: a file is not visible on the driver after a worker has written it.
        """
        if self._beside:
            cluster.call(TrainWorker.begin_save, folder, optimizer=self._optimizer)
            self._begun.append((cluster, folder))
            return
        cluster.call(TrainWorker.save, folder, optimizer=self._optimizer)
        require_written(folder / "meta.json")

    def _complete(self, draft: Draft) -> None:
        """Make a checkpoint complete, and have it copied to `checkpoint.upload`."""
        self._checkpoints.complete_draft(draft)
        if self._uploads is not None:
            self._uploads.add(draft.final)

    def check(self) -> None:
        """Raise the error of a write that has failed or stopped growing, once; see `save`. Warn of
        a copy to `checkpoint.upload` that makes no progress."""
        if self._uploads is not None:
            self._uploads.look()
        write, self._write = self._write, None
        if write is not None and not write.look():
            self._write = write

    def wait(self) -> None:
        """Wait until no write is under way; the errors are those of `save`."""
        while self._write is not None:
            self._write.ended.wait(LAST_LOOK_S)
            self.check()

    def __enter__(self) -> Saves:
        if self._uploads is not None:  # an earlier session may have been killed
            for _, checkpoint in self._checkpoints.complete():
                self._uploads.add(checkpoint, replace=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._write is not None:
            logger.warning("the last checkpoint is completed first; Ctrl-C gives it up")
            try:
                self.wait()
            except Exception as other:  # noqa: BLE001 - the first error is the one to be told
                logger.warning("it was not completed: %s", other)
        if self._uploads is not None and (error is None or isinstance(error, Exception)):
            self._uploads.wait()


class _Write:
    """A checkpoint that the workers write, and the thread of the driver that follows them."""

    def __init__(
        self,
        complete: Callable[[Draft], None],
        draft: Draft,
        begun: Sequence[tuple[Cluster[Any], Path]],
        limit_s: float,
    ) -> None:
        self.ended = threading.Event()
        self._complete = complete
        self._draft = draft
        self._clusters = [cluster for cluster, _ in begun]
        self._folders = [folder for _, folder in begun]
        self._limit_s = limit_s
        self._error: BaseException | None = None
        self._num_bytes = 0
        self._moved_s = time.monotonic()
        # A daemon, so that a disk that hangs does not keep the process alive.
        threading.Thread(target=self._work, name="roll-checkpoint", daemon=True).start()

    def look(self) -> bool:
        """Return whether the checkpoint is complete, without waiting; raise the error of the write,
        also if it has stopped growing."""
        if self.ended.is_set():
            if self._error is not None:
                raise self._error
            return True
        if time.monotonic() - self._moved_s > self._limit_s:
            raise WaitTimeoutError(
                f"{self._draft.folder} is written beside the steps, and for {self._limit_s:g} s "
                f"(cluster.call_timeout_s) no byte came to its {self._num_bytes}; the disk may "
                "hang. The run goes on from the checkpoint before"
            )
        return False

    def _work(self) -> None:
        """Complete the checkpoint, or delete it and keep the error."""
        try:
            self._wait_for(Written.OWN)
            for cluster in self._clusters:
                cluster.beside(TrainWorker.complete_save).result(self._limit_s)
            self._wait_for(Written.ALL)
            for folder in self._folders:
                require_written(folder / "meta.json")
            self._complete(self._draft)
        except BaseException as error:  # noqa: BLE001 - `look` raises it
            self._draft.discard()
            self._error = error
        finally:
            self.ended.set()

    def _wait_for(self, aim: Written) -> None:
        """Wait until every rank of every cluster is as far as `aim`; raise the error of a rank."""
        pause_s = FIRST_LOOK_S
        for cluster in self._clusters:
            while cluster.beside(TrainWorker.look_at_save).result(self._limit_s) < aim:
                self._measure()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_LOOK_S)
        self._measure()

    def _measure(self) -> None:
        """Note whether the files have grown. Blocks count, too: some files get their size before
        their content."""
        found = 0
        for root, _, names in os.walk(self._draft.folder):
            for name in names:
                with suppress(FileNotFoundError):  # renamed meanwhile
                    about = os.stat(os.path.join(root, name))
                    found += about.st_size + 512 * about.st_blocks
        if found != self._num_bytes:
            self._num_bytes, self._moved_s = found, time.monotonic()
