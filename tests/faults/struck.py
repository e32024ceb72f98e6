"""Runs in which processes are struck: `python -m tests.faults.struck RUN_YAML NOTES CELL...`.

It takes the way of `roll run`; what is added are the moments at which it strikes. Cells that end
the run come one after the other: each is a run of its own, which resumes what the one before left,
and a last run is struck by nobody. Cells whose process is replaced come in one run. NOTES gets a
line of JSON for each cell and one for the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from roll.commands.launch import launch
from roll.commands.preloads import forking
from roll.config import load_config
from roll.core.batches import RolloutBatch
from roll.core.errors import RollError
from roll.core.metrics import Metrics
from roll.core.sample_table import SampleTable
from roll.distributed.on_ray import start as ray_start
from roll.distributed.on_ray.environment import RUN_TOKEN, prepare_ray
from roll.distributed.processes.fork_server import ForkServer
from roll.pipeline.rlvr import RlvrPipeline
from roll.platform.machine import cores
from roll.runtime.inference_service import InferenceService
from roll.runtime.rollouts.generation import Generation
from roll.runtime.weight_pusher import WeightPusher
from tests.faults.table import NAMES, REPLACED, Cell, Kind, Phase

FOREVER = 100_000
POLL_S = 0.01


class AllStruck(RollError):
    """Every cell whose process is replaced has been struck, and survived."""


def pid_of(kind: Kind) -> int | None:
    """The process of that kind that this one, or the Ray that it started, has started."""
    if kind is Kind.FORKER:  # of all fork servers the one that the replica started
        worker = pid_of(Kind.REPLICA)
        children = [] if worker is None else psutil.Process(worker).children()
        return next((c.pid for c in children if any("fork_loop" in w for w in c.cmdline())), None)
    wanted = {Kind.CORE: "EngineCore", Kind.RAYLET: "/raylet/raylet "}.get(
        kind, f"ray::{NAMES[kind].replace(':', '_')}"
    )
    mark = f"{RUN_TOKEN}={os.environ[RUN_TOKEN]}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if wanted in command and mark in Path(f"/proc/{name}/environ").read_bytes():
                return int(name)
        except OSError:
            continue
    return None


@dataclass
class Striker:
    """Strikes the cells in their order, each at the first moment that is right."""

    cells: list[Cell]
    notes: Path
    hold: Path
    """Rewards take a while as long as this file exists."""
    under_way: Cell | None = field(default=None, init=False)
    aiming: bool = field(default=False, init=False)
    """A thread waits for the right moment."""
    struck_s: float = field(default=0.0, init=False)
    lost_before: int = field(default=0, init=False)
    """Replicas that had been lost when it struck."""
    lost_s: float | None = field(default=None, init=False)
    """From the strike to the loss of the replica."""
    is_lost: Callable[[], bool] = field(default_factory=lambda: bool, init=False)
    """Whether the replica that is struck counts as lost; told by each run."""

    def due(self, phase: Phase) -> bool:
        return self.under_way is None and bool(self.cells) and self.cells[0].phase is phase

    def strike(self) -> None:
        pid = pid_of(self.cells[0].kind)
        assert pid is not None, f"there is no process to strike for {self.cells[0]}"
        self.under_way, self.struck_s = self.cells.pop(0), time.monotonic()
        self.lost_s = None
        os.kill(pid, self.under_way.how)
        if self.under_way.kind in REPLACED:
            threading.Thread(target=self._time_loss, daemon=True).start()

    def at(self, phase: Phase) -> None:
        """The run is at this moment."""
        if self.due(phase):
            self.strike()

    def soon(self, phase: Phase, ready: Callable[[], bool]) -> None:
        """The run begins what leads to this moment; it is there when `ready` says so."""
        if self.aiming or not self.due(phase):
            return
        self.aiming = True

        def wait() -> None:
            while not ready():
                time.sleep(POLL_S)
            self.aiming = False
            self.strike()
            self.hold.unlink(missing_ok=True)

        threading.Thread(target=wait, daemon=True).start()

    def _time_loss(self) -> None:
        """It takes seconds until another stands in the place of the lost one."""
        while not self.is_lost():
            time.sleep(POLL_S)
        self.lost_s = time.monotonic() - self.struck_s

    def note(self, error: str | None, **more: Any) -> None:
        """What became of the strike that is under way, or of a run that nobody struck."""
        cell, self.under_way = self.under_way, None
        line = {"cell": cell and str(cell), "error": error, "s": time.monotonic() - self.struck_s}
        with self.notes.open("a") as file:
            file.write(json.dumps(line | more) + "\n")


class Struck(RlvrPipeline):
    """The pipeline of a run, told where it is; a subclass for each run has its striker."""

    striker: Striker

    def open(self) -> None:
        super().open()
        inference, striker = self._inference, self.striker
        striker.is_lost = lambda: inference.fleet.replicas[0].gone
        old = inference.pusher
        assert old is not None
        inference.pusher = StruckPusher(
            old.actor, old.infer, old.platform, old.config, striker=striker
        )

    @property
    def _inference(self) -> InferenceService:
        assert isinstance(self.runtime.rollouts, Generation)
        return self.runtime.rollouts.inference

    def restore(self, *given: Any) -> None:
        self.striker.at(Phase.START)
        super().restore(*given)

    def step(self, step: int) -> Metrics:
        replicas = self._inference.fleet.replicas
        held = self.striker.hold.with_suffix(".held")
        held.unlink(missing_ok=True)
        if self.striker.due(Phase.REWARD):
            self.striker.hold.touch()
        self.striker.soon(Phase.GENERATE, lambda: replicas[0].requests > 0)
        self.striker.soon(Phase.REWARD, held.exists)
        metrics = super().step(step)
        cell = self.striker.under_way
        if cell is not None and cell.kind in REPLACED and self._is_whole(metrics):
            self.striker.note(None, step=step, lost_s=self.striker.lost_s)
            if not self.striker.cells:
                raise AllStruck
        return metrics

    def _is_whole(self, metrics: Metrics) -> bool:
        """Whether the loss was noticed, and another replica is there."""
        self.striker.lost_before += int(metrics.values_by_name()["rollout/lost_replicas"])
        whole = not any(replica.gone for replica in self._inference.fleet.replicas)
        if self.striker.lost_before and whole:
            self.striker.lost_before = 0
            return True
        return False

    def learn(self, table: SampleTable, step: int) -> Metrics:
        self.striker.at(Phase.HAND_OVER)
        return super().learn(table, step)

    def train(self, batch: RolloutBatch | SampleTable, step: int) -> Metrics:
        self.striker.at(Phase.ASLEEP)
        begun = time.monotonic()
        self.striker.soon(Phase.TRAIN, lambda: time.monotonic() - begun > POLL_S)
        return super().train(batch, step)

    def save(self, folder: Path) -> None:
        self.striker.at(Phase.CHECKPOINT)
        super().save(folder)

    def validate(self, step: int) -> dict[str, float]:
        if step:
            replicas = self._inference.fleet.replicas
            self.striker.soon(Phase.VALIDATE, lambda: replicas[0].requests > 0)
        return super().validate(step)


@dataclass
class StruckPusher(WeightPusher):
    """Strikes between the question where the receivers are and the transfer."""

    striker: Striker = field(kw_only=True)

    def _route(self, *given: Any) -> Any:
        self.striker.at(Phase.PUSH)
        return super()._route(*given)


@dataclass(frozen=True)
class Runs:
    """Runs of one file, one after the other; their workers are forks of one server."""

    path: Path
    striker: Striker
    fork_server: ForkServer | None

    def run(self, max_steps: int) -> None:
        """One run, to its end."""
        pipeline = type("StruckOnce", (Struck,), {"striker": self.striker})
        loaded = load_config(self.path, [f"max_steps={max_steps}"])
        launch(loaded, {"rlvr": pipeline}, self.fork_server)


def last_step(folder: Path) -> int:
    """Of the newest checkpoint."""
    steps = [int(p.name.removeprefix("step_")) for p in folder.glob("checkpoints/step_*")]
    return max(steps, default=0)


def main(path: Path, notes: Path, cells: Sequence[Cell]) -> None:
    with forking(load_config(path).config) as fork_server:
        strike_all(Runs(path, Striker([], notes, path.with_name("hold")), fork_server), cells)


def survived(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that no run ends by, for as few runs as can be: a run starts but once."""
    runs: list[list[Cell]] = []
    for cell in cells:
        if cell.kind in REPLACED:
            if cell.phase is Phase.START or not runs:
                runs.append([])
            runs[-1].append(cell)
    return runs


def strike_all(runs: Runs, cells: Sequence[Cell]) -> None:
    striker = runs.striker
    if not any(cell.kind is Kind.RAYLET for cell in cells):
        prepare_ray()  # one Ray for all runs; each starts its own where this one is to be struck
        ray_start.start(num_cpus=len(cores()), num_gpus=0)
    for in_one_run in survived(cells):
        striker.cells = in_one_run
        with suppress(AllStruck):
            runs.run(FOREVER)
    for cell in cells:
        if cell.kind in REPLACED:
            continue
        striker.cells = [cell]
        try:
            runs.run(FOREVER)
        except RollError as error:
            striker.note(str(error))
    before = last_step(runs.path.parent / "out")
    runs.run(before + 1)
    striker.note(None, step=last_step(runs.path.parent / "out"), before=before)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Cell.of(text) for text in sys.argv[3:]])
