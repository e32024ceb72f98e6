"""`Pipeline`: the half that all pipelines share: resume, the step loop, validation, checkpoints."""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from roll.config.pipelines import RunConfig
from roll.core.metrics import Metrics
from roll.core.timing import Timers
from roll.distributed.cluster import Launcher
from roll.pipeline.checkpoint import Checkpoints, RunState, load_state
from roll.pipeline.summary import summarize, write_json
from roll.pipeline.track import Trackers, open_trackers, read_records

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=RunConfig)


class Pipeline(ABC, Generic[C]):
    """One run. Subclasses say what a step is; this class repeats it and keeps its books.

    Steps are numbered from 0; record `step` describes the step that begins with `step` updates
    done, and carries the validation of the policy it begins with.
    """

    def __init__(self, config: C, launcher: Launcher) -> None:
        self.config = config
        self.launcher = launcher
        self.output_dir = Path(config.output_dir)
        self.checkpoints = Checkpoints(self.output_dir / "checkpoints", config.checkpoint)
        self.timers = Timers()

    @abstractmethod
    def open(self) -> None:
        """Load data, start clusters."""

    @abstractmethod
    def restore(self, checkpoint: Path | None, state: RunState | None) -> None:
        """Take up a checkpoint (or begin without one); afterwards the engines hold its weights."""

    @abstractmethod
    def step(self, step: int) -> Metrics:
        """One step: everything between two sets of weights."""

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Scores of the policy after `step` steps; empty when none is due."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """What the workers must remember, into `folder`."""

    @abstractmethod
    def export(self) -> None:
        """The final weights for others to use."""

    @abstractmethod
    def sampler_state(self) -> dict[str, Any]:
        """Position in the data, as plain JSON."""

    def run(self) -> dict[str, Any]:
        """From the newest checkpoint to the last step; returns the summary.

        The launcher is not closed here: who opened it closes it, also after an error.
        """
        begun = time.perf_counter()
        config = self.config
        checkpoint = self.checkpoints.find(config.resume)
        state = load_state(checkpoint) if checkpoint else None
        if state and state.step >= config.max_steps:
            logger.info(
                "%s is complete (%d of %d steps); raise max_steps to go on, or set resume=never to "
                "start anew",
                config.output_dir,
                state.step,
                config.max_steps,
            )
            return self.summary("finished", begun)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        resolved = json.loads(config.model_dump_json())
        text = yaml.safe_dump(resolved, sort_keys=False)
        (self.output_dir / "config.yaml").write_text(text, encoding="utf-8")
        self.open()
        self.restore(checkpoint, state)
        first = state.step if state else 0
        if state:
            logger.info("resuming from %s, step %d of %d", checkpoint, first, config.max_steps)
        with open_trackers(
            config.track,
            self.output_dir,
            first_step=first,
            max_steps=config.max_steps,
            resolved=resolved,
        ) as trackers:
            self._loop(first, state.carried if state else self.validate(0), trackers)
        if config.checkpoint.export_hf:
            self.export()
        return self.summary("finished", begun)

    def _loop(self, first: int, carried: dict[str, float], trackers: Trackers) -> None:
        last = self.config.max_steps
        for step in range(first, last):
            with self.timers.timed("step"):
                metrics = self.step(step)
            metrics = metrics | self.timers.take()
            trackers.log(step, {**carried, **metrics.values_by_name()})
            done = step + 1
            carried = self.validate(done)
            every = self.config.checkpoint.every
            if done == last or (every is not None and done % every == 0):
                with self.timers.timed("checkpoint"):
                    self._checkpoint(done, carried)
        if carried:
            trackers.log(last, carried)

    def _checkpoint(self, done: int, carried: dict[str, float]) -> None:
        state = RunState(step=done, sampler=self.sampler_state(), carried=carried)
        with self.checkpoints.writing(state) as folder:
            self.save(folder)
            source = self.output_dir / "config.yaml"
            (folder / "config.yaml").write_bytes(source.read_bytes())

    def summary(self, status: str, begun: float) -> dict[str, Any]:
        """Write and return `summary.json`, made from the records on disk."""
        records = read_records(self.output_dir / "metrics.jsonl")
        summary = summarize(records, status=status, wall_s=time.perf_counter() - begun)
        write_json(self.output_dir / "summary.json", summary)
        return summary
