"""Which process is struck when, how, and what becomes of the run: the table of `docs/faults.md`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

TARGET = Path(__file__).parents[2] / "docs" / "faults.md"


class Kind(StrEnum):
    """A process of a run."""

    TRAINER = "trainer"
    REPLICA = "replica"
    CORE = "engine core"
    FORKER = "its fork server"
    REWARD = "reward"
    JUDGE = "reward model"
    REFERENCE = "reference"
    CRITIC = "critic"
    TEACHER = "teacher"
    RAYLET = "raylet"


class Phase(StrEnum):
    """What the run does at that moment."""

    START = "start"
    GENERATE = "generate"
    REWARD = "reward"
    HAND_OVER = "hand-over"
    ASLEEP = "asleep"
    TRAIN = "train"
    PUSH = "push"
    CHECKPOINT = "checkpoint"
    VALIDATE = "validate"


REPLACED = frozenset({Kind.REPLICA, Kind.CORE, Kind.FORKER})
"""Kinds that are replaced while the run goes on; all others end it."""

NAMES = {
    Kind.TRAINER: "actor_train[0]",
    Kind.REPLICA: "actor_infer[0]",
    Kind.CORE: "actor_infer[0]",
    Kind.FORKER: "actor_infer[0]",
    Kind.REWARD: "reward:digits[0]",
    Kind.JUDGE: "reward:judge[0]",
    Kind.REFERENCE: "reference[0]",
    Kind.CRITIC: "critic[0]",
    Kind.TEACHER: "teacher:t[0]",
    Kind.RAYLET: "Ray's raylet",
}
"""What a message calls the one that is struck."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One strike."""

    kind: Kind
    phase: Phase
    how: signal.Signals

    def __str__(self) -> str:
        return f"{self.kind}/{self.phase}/{self.how.name}"

    @staticmethod
    def of(text: str) -> Cell:
        kind, phase, how = text.split("/")
        return Cell(Kind(kind), Phase(phase), signal.Signals[how])


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def cells() -> Iterator[Cell]:
    """The whole table."""
    for kind in Kind:
        for phase in Phase:
            for how in (KILL, STOP):
                yield Cell(kind, phase, how)


CHOSEN = (
    Cell(Kind.TRAINER, Phase.TRAIN, STOP),
    Cell(Kind.REWARD, Phase.REWARD, STOP),
    Cell(Kind.JUDGE, Phase.VALIDATE, KILL),
    Cell(Kind.REFERENCE, Phase.HAND_OVER, STOP),
    Cell(Kind.CRITIC, Phase.CHECKPOINT, KILL),
    Cell(Kind.TEACHER, Phase.START, STOP),
    Cell(Kind.TRAINER, Phase.PUSH, KILL),
    Cell(Kind.REPLICA, Phase.START, KILL),
    Cell(Kind.REPLICA, Phase.GENERATE, STOP),
    Cell(Kind.REPLICA, Phase.HAND_OVER, KILL),
    Cell(Kind.REPLICA, Phase.ASLEEP, STOP),
    Cell(Kind.REPLICA, Phase.PUSH, KILL),
    Cell(Kind.REPLICA, Phase.PUSH, STOP),
    Cell(Kind.REPLICA, Phase.VALIDATE, KILL),
    Cell(Kind.CORE, Phase.GENERATE, KILL),
    Cell(Kind.CORE, Phase.ASLEEP, STOP),
    Cell(Kind.FORKER, Phase.PUSH, KILL),
    Cell(Kind.RAYLET, Phase.GENERATE, KILL),
    Cell(Kind.RAYLET, Phase.TRAIN, STOP),
)
"""What `make test` strikes: every kind, every phase, both signals. `--all-faults` strikes all."""


def outcome(cell: Cell) -> str:
    """What becomes of the run."""
    return "goes on" if cell.kind in REPLACED else "ends, named"


INTRO = """\
# What a dead or stopped process does to a run

Made by `python -m tests.faults.table`; `tests/faults/test_table.py` strikes the cells, and compares
this file. In a run of two replicas, of which the first shares its device with the trainer, one
process is killed (SIGKILL) or stopped (SIGSTOP: it lives, and answers nothing any more) at each
moment of a step.

* **goes on**: within 30 s the replica is lost, and within three minutes another is built in its
  place; no sample is lost. A process that is stopped is noticed after 5 to 12 s.
* **ends, named**: within 30 s the run ends with an error that names the process, and the same
  command goes on from the last checkpoint.

`make test` strikes the cells in bold; `pytest tests/faults/test_table.py --all-faults` all of them.
A stopped worker is told from one that computes for long: who is silent is looked at from outside,
and only one that a signal has stopped, or that has computed nothing for five minutes, is given up.
Before a worker has answered for the first time (its process starts), only `start_timeout_s` tells
that it was stopped.

"""


def text() -> str:
    """The page."""
    chosen = set(CHOSEN)
    rows = ["| " + " | ".join(["struck", *Phase]) + " |", "|---" * (len(Phase) + 1) + "|"]
    for kind in Kind:
        columns = []
        for phase in Phase:
            said = dict.fromkeys(outcome(Cell(kind, phase, how)) for how in (KILL, STOP))
            struck = any(Cell(kind, phase, how) in chosen for how in (KILL, STOP))
            columns.append(" / ".join(f"**{one}**" if struck else one for one in said))
        rows.append("| " + " | ".join([kind, *columns]) + " |")
    return INTRO + "\n".join(rows) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
