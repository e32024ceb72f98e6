"""`Pipeline`: base class of all pipelines, with resume, step loop, validation and checkpoints."""

from __future__ import annotations

import json
import logging
import signal
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from roll.config.loading.written import run_file_text
from roll.config.run import RunConfig
from roll.config.sections.roles import Role
from roll.core.errors import CheckpointError, StoppedEarlyError, ValidationCutError
from roll.core.metrics import Metrics
from roll.core.threads.loop_thread import LoopThread
from roll.core.timing import Timers
from roll.distributed.cluster import Cluster, Launcher
from roll.distributed.processes.shutdown import StopWish
from roll.models.kernels.choice import settle_attention
from roll.output_dir.checkpoints import Checkpoints, RunState, require_written, write_folder
from roll.output_dir.path_resolution import absolute_paths
from roll.output_dir.patience import Patience
from roll.output_dir.resume import (
    Start,
    exported_file,
    find_start,
    finished_summary,
    mark_export,
    same_command,
    stopped_early,
    tell_resumption,
    where_it_goes_on,
)
from roll.output_dir.sample_files import drop_samples
from roll.output_dir.summary import FILE
from roll.output_dir.trackers import Trackers, open_trackers
from roll.output_dir.whole_file import replace_file
from roll.pipeline.outputs.saves import Saves
from roll.pipeline.outputs.session import Session
from roll.pipeline.profiling import StepProfiler
from roll.pipeline.usage.machines import Machines
from roll.pipeline.usage.speed import Speed
from roll.runtime.run_data import RunData
from roll.workers.model import TrainWorker

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)


class Pipeline(ABC, Generic[C]):
    """Base class of a run. A subclass defines what a step does; this class repeats the step, and
    writes metrics, checkpoints and the summary.

    Steps are numbered from 0. Step k begins after k steps have been done. The record of step k in
    the metrics holds the metrics of this step, and the validation scores of the policy at its
    beginning.
    """

    config_class: ClassVar[type[RunConfig]]
    """Class of the run file."""

    def __init__(
        self, config: C, launcher: Launcher, loop: LoopThread, *, platform: str, data: Any
    ) -> None:
        """Store what the run needs; nothing is started yet.

        `self.config` is the config with absolute paths; `self.written` is the config as given, but
        with a kernel in place of `attention: auto`.

        Args:
            config: first result of `prepare`.
            launcher: starts the clusters.
            loop: event loop on which all generation runs.
            platform: `cpu` or `cuda`.
            data: second result of `prepare`.
        """
        self.written = config = settle_attention(config, platform)
        self.config = absolute_paths(config)
        self.output_dir = Path(self.config.output_dir)
        self.profiler = StepProfiler(config, launcher, self.output_dir / "profile", platform)
        self.launcher: Launcher = self.profiler
        self.loop = loop
        self.platform = platform
        self.data = data
        self.checkpoints = Checkpoints(self.output_dir / "checkpoints", config.checkpoint)
        self.saves = Saves(self.checkpoints, config.cluster.call_timeout_s)
        self.timers = Timers()
        self.speed = Speed(self.profiler.clusters, config.cluster.peak_tflops)
        self.machines = Machines(self.profiler.clusters, self.output_dir)
        self.session = Session(self.output_dir, self._rows_told)
        self._patience = Patience(config.validation.stop, {})
        self.wish = StopWish(self.config.stop_at)
        self._ended_early: str | None = None

    @classmethod
    @abstractmethod
    def prepare(cls, config: C) -> tuple[C, Any]:
        """Load and check the data of the run, so that errors show before anything is started.

        Returns:
            The config, with the settings that depend on the data filled in; and the data.
        """

    @abstractmethod
    def open(self) -> None:
        """Start the clusters of the run."""

    @abstractmethod
    def close(self) -> None:
        """Stop what `open` started in the driver's process; the launcher ends the clusters."""

    @abstractmethod
    def restore(self, checkpoint: Path | None, state: RunState | None) -> None:
        """Restore a checkpoint; without one, prepare for the first step. Afterwards the engines, if
        there are any, hold the weights of the policy."""

    @abstractmethod
    def step(self, step: int) -> Metrics:
        """Do one step, from the current weights of the policy to the next ones; return its
        metrics."""

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Return scores and time of a validation after `step` steps; empty if none is due.

        Raises:
            ValidationCutError: `wish` has got a reason meanwhile.
        """

    @abstractmethod
    def learners(self) -> dict[Role, Cluster[Any]]:
        """Return role -> cluster for every cluster that trains a model. The model of `actor_train`
        is the result of the run."""

    @abstractmethod
    def exclusive_devices(self, role: Role) -> AbstractContextManager[None]:
        """Move a role onto its devices for the block, and the roles that share them off."""

    def load(self, checkpoint: Path) -> None:
        """Load the state of all training clusters from a folder that `save` wrote.

        Raises:
            CheckpointError: the checkpoint is of a run that does not train all of them.
        """
        for role, cluster in self.learners().items():
            if not (checkpoint / role).is_dir():
                raise CheckpointError(
                    f"{checkpoint} has no state of {role}: another kind of run has written it, "
                    "such as `roll rollout`; give this run another output_dir, or set resume to a "
                    "checkpoint of a run like it"
                )
            with self.exclusive_devices(role):
                cluster.call(TrainWorker.load, checkpoint / role)

    def save(self, folder: Path) -> None:
        """Write the state of all training clusters into `folder`, one subfolder per role, or copy
        it to be written; see `Saves.save_role`."""
        for role, cluster in self.learners().items():
            with self.exclusive_devices(role):
                self.saves.save_role(cluster, folder / role)

    def export(self, step: int) -> None:
        """Write the model after `step` steps into `<output_dir>/hf`, in the format of Hugging Face.

        Raises:
            CheckpointError: a file is not visible on the driver after a worker has written it.
        """
        learner = self.learners()[Role.ACTOR_TRAIN]

        def write(path: Path) -> None:
            learner.call(TrainWorker.save_hf, path)
            require_written(path / exported_file(self.config.train_model))
            mark_export(path, step)

        with self.exclusive_devices(Role.ACTOR_TRAIN):
            write_folder(self.output_dir / "hf", write)

    @abstractmethod
    def sampler_state(self) -> dict[str, Any]:
        """Return the position in the data, and other state of the driver, as JSON objects and
        arrays of numbers."""

    def run(self) -> dict[str, Any]:
        """Run from the checkpoint that `resume` selects to the last step; return the summary.

        A run that is complete already returns its summary at once. An error is noted in the summary
        and raised. The caller must close the launcher, also after an error.
        """
        done = finished_summary(self.config)
        if done is not None:
            with self.saves:  # the last session may have been killed before its copy was made
                return done
        self.session.begin()
        self.output_dir.mkdir(parents=True, exist_ok=True)
        start = find_start(self.config)
        try:
            self._run(start)
        except (KeyboardInterrupt, StoppedEarlyError) as stop:
            self.session.note_end("stopped", stop)
            if isinstance(stop, KeyboardInterrupt):
                stop.add_note(where_it_goes_on(self.config))
            raise
        except Exception as error:
            self.session.note_end("failed", error)
            raise
        return self.session.finish(self._ended_early)

    def _run(self, start: Start) -> None:
        """Open the pipeline, do the rest of the run, and close it, unless `open` has failed."""
        self.session.earlier_s = start.state.wall_s if start.state else 0.0
        self.open()
        try:
            self._resume_and_train(start)
        finally:
            self.close()

    def _resume_and_train(self, start: Start) -> None:
        """Restore the run, do the steps that are left, and export if that is configured; with none
        left, log a validation that is not recorded yet."""
        config, state = self.config, start.state
        self.restore(start.checkpoint, state)
        self.session.under_way = True
        self._patience = Patience(config.validation.stop, state.patience if state else {})
        self._ended_early, done = start.ended_early(config), start.step
        if start.step < config.max_steps and self._ended_early is None:
            self.checkpoints.abandon_newer(start.step)
            drop_samples(self.output_dir, done=start.step)
            self._write_config()
            if state:
                tell_resumption(start, self.written)
            elif (self.output_dir / "metrics.jsonl").exists():
                logger.info("%s has no checkpoint yet: the run begins anew", self.output_dir)
            with self._trackers(start.step) as trackers:
                done = self._loop(start.step, state.carried if state else None, trackers)
        else:
            with self.saves:
                if state and not start.recorded:
                    logger.info("the steps are done; their last validation was not recorded yet")
                    with self._trackers(start.step) as trackers:
                        trackers.log(start.step, self._carried(start.step, state.carried))
        if config.checkpoint.export_hf:
            self.export(done)

    def _loop(self, first: int, carried: dict[str, float] | None, trackers: Trackers) -> int:
        """Do the steps from `first` on, with validations and checkpoints, to the last one or until
        validations no longer improve; return the number of steps done.

        Args:
            carried: scores of the validation after `first` steps, logged with the next step; None:
                of a run that begins or whose validation has failed, which is validated here.

        Raises:
            StoppedEarlyError: the run was asked to end; the step that was under way is saved.
        """
        last, done, wish = self.config.max_steps, first, self.wish
        with wish.asked_by(signal.SIGTERM), self.saves, self.machines:
            carried = self._carried(first, carried)
            if first and self._is_over(first):  # by a validation that the session before left to do
                last = first
            for step in range(first, last):
                wish.step = step
                with self.profiler.step(step, self.timers), self.timers.timed("step"):
                    metrics = self.step(step)
                metrics = metrics | self.timers.take() | self.speed.take() | self.machines.take()
                trackers.log(step, {**carried, **metrics.values_by_name()})
                done = step + 1
                carried = self._validated(done, saved=False)
                self.saves.check()
                reason, over, every = wish.reason, self._is_over(done), self.config.checkpoint.every
                if over or reason or (every is not None and done % every == 0):
                    with self.timers.timed("checkpoint"):
                        self._checkpoint(done, carried, at_once=over or bool(reason))
                if over:
                    break
                if reason:
                    raise stopped_early(self.config, done, reason)
        if carried:
            trackers.log(done, carried)
        return done

    def _validated(self, done: int, *, saved: bool) -> dict[str, float]:
        """Validate after `done` steps, if that is due; return the scores, which `validation.stop`
        counts.

        Args:
            saved: whether the steps are saved. If not, and the validation fails, they are saved
                before the error goes on: they are good.

        Raises:
            StoppedEarlyError: the run is asked to end. Batch systems wait for no validation, so the
                next session begins with it.
        """
        try:
            reason, last = self.wish.reason, self.config.max_steps
            if reason and self.config.validation.due(done, last=last):
                raise ValidationCutError(reason)
            scores = self.validate(done)
        except ValidationCutError:
            if not saved:
                self._checkpoint(done, None)
            raise stopped_early(self.config, done, self.wish.reason or "") from None
        except Exception:
            if not saved:
                self._save_unvalidated(done)
            raise
        self._patience.see(done, scores)
        return scores

    def _carried(self, done: int, carried: dict[str, float] | None) -> dict[str, float]:
        """Return the scores of the validation after `done` steps, with which the session begins. If
        the session before had left it to do, the checkpoint gets them."""
        if carried is None:
            carried = self._validated(done, saved=True)
            if done:
                self._checkpoint(done, carried)
        return carried

    def _save_unvalidated(self, done: int) -> None:
        """Save the steps behind which the validation has failed, and the model of the last one. A
        failure is only logged: that of the validation is the cause."""
        of = f"{done} of {self.config.max_steps} steps"
        logger.error("the validation after %s failed; the steps are being saved", of)
        try:
            self._checkpoint(done, None)
            if done >= self.config.max_steps and self.config.checkpoint.export_hf:
                self.export(done)
        except Exception as unsaved:  # noqa: BLE001 - the caller raises the cause
            logger.error("the steps could not be saved: %s", unsaved)
        else:
            logger.error("%s are saved; %s validates them", of, same_command(self.config))

    def _is_over(self, done: int) -> bool:
        """Return whether the run ends after `done` steps; say so if it is not the last one."""
        if done >= self.config.max_steps:
            return True
        self._ended_early = self._patience.end
        if self._ended_early is not None:
            logger.info("the run ends after %d steps: %s", done, self._ended_early)
        return self._ended_early is not None

    def _checkpoint(
        self, done: int, carried: dict[str, float] | None, *, at_once: bool = True
    ) -> None:
        """Write a checkpoint of the state after `done` steps; see `Saves.save`. `carried` is None
        if their validation is still to do."""
        self.saves.wait()  # so that all of the state is of the moment after it
        state = RunState(
            step=done,
            sampler=self.sampler_state(),
            carried=carried,
            wall_s=self.session.wall_s,
            rendered_at=self.data.rendered_at.isoformat(),
            patience=self._patience.state,
            optimizer=self.config.checkpoint.optimizer or not self.learners(),
        )
        self.saves.save(state, self.save, self.output_dir / "config.yaml", at_once=at_once)

    def _trackers(self, first_step: int) -> Trackers:
        """Open the configured trackers for the steps from `first_step` on."""
        trackers = open_trackers(
            self.config.track,
            self.output_dir,
            first_step=first_step,
            max_steps=self.config.max_steps,
            resolved=json.loads(self.written.model_dump_json()),
            phase=lambda: self.timers.phase,
        )
        self.session.failed_trackers = trackers.failed
        return trackers

    def _write_config(self) -> None:
        """Write the resolved config to `config.yaml` in the output folder, and remove the summary,
        which tells how an earlier session ended.

        Call this only after the restore has succeeded, so that a session that is refused leaves the
        files of an earlier session as they are.
        """
        (self.output_dir / FILE).unlink(missing_ok=True)
        replace_file(self.output_dir / "config.yaml", run_file_text(self.written))

    def _rows_told(self) -> list[dict[str, Any]]:
        """Return what became of the rows of each source; nothing for a pipeline of the user's with
        data of its own."""
        return self.data.rows_told() if isinstance(self.data, RunData) else []
