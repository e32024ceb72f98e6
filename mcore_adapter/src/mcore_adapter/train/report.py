"""Progress report of a run: a progress bar or lines of text, and a line of JSON for every step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mcore_adapter.convert.storage.output import wait_for_disk
from mcore_adapter.shared_results import gather_results

Metrics = Mapping[str, float]
"""Values of metrics, by name."""


class Report:
    """Progress report of a run. Making it, `step` and `validation` are collectives: if rank 0
    cannot write, all ranks raise ConversionError, so that none waits for it.

    Args:
        path: file for the lines of JSON. Lines of steps that will be repeated are removed from it.
        speaks: True on rank 0, the only rank that prints and writes.
        first_step: number of steps made before, by the part of the run that is resumed.
        num_steps: number of steps of the whole run.
        every: number of steps between lines of text, if there is no terminal for a bar.
    """

    def __init__(self, path: Path, *, speaks: bool, first_step: int, num_steps: int, every: int):
        self._path, self._speaks = path, speaks
        self._num_steps, self._every = num_steps, every
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (speaks and self._console.is_terminal),
        )
        self._task = self._bar.add_task("", total=num_steps, completed=first_step)
        self._on_file(lambda: _keep(path, first_step))

    @contextmanager
    def shown(self) -> Iterator[Report]:
        """Show the progress bar within the block."""
        with self._bar:
            yield self

    def say(self, text: str) -> None:
        """Print a line to standard error, on rank 0 only."""
        if self._speaks:
            self._console.print(text, markup=False)

    def step(self, done: int, metrics: Metrics) -> None:
        """Report a training step.

        Args:
            done: number of steps made so far, this one included.
            metrics: metrics of the step, among them `loss`, `lr` and `tokens_per_s`.
        """
        self._write({"step": done, **metrics})
        text = (
            f"loss {metrics['loss']:.4f}  lr {metrics['lr']:.2e}  "
            f"{metrics['tokens_per_s']:,.0f} tokens/s"
        )
        self._bar.update(self._task, completed=done, description=text)
        # A progress bar shows these values already.
        if self._bar.disable and (done % self._every == 0 or done == self._num_steps):
            self.say(f"step {done}/{self._num_steps}  {text}")

    def validation(self, done: int, metrics: Metrics) -> None:
        """Report a validation after `done` steps."""
        self._write({"step": done, **{f"validation/{k}": v for k, v in metrics.items()}})
        values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.say(f"step {done}/{self._num_steps}  validation: {values}")

    def _write(self, line: Metrics) -> None:
        """Append a line of JSON with the present time to the file, on rank 0 only. Collective."""

        def append() -> None:
            with self._path.open("a") as file:
                file.write(json.dumps({**line, "time": time.time()}) + "\n")

        self._on_file(append)

    def _on_file(self, work: Callable[[], None]) -> None:
        """Do some work on the file, on rank 0 only; all ranks raise its error. Collective."""
        gather_results(work if self._speaks else lambda: None, str(self._path))


def _keep(path: Path, steps: int) -> None:
    """Replace the file by one with its lines of the first `steps` steps; without steps, none.

    The file is replaced as a whole, so that a run that is killed here loses no line.
    """
    lines = path.read_bytes().splitlines() if path.is_file() else []
    kept = [line for line in lines if 0 < _step_of(line) <= steps]
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_bytes(b"".join(line + b"\n" for line in kept))
        wait_for_disk(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _step_of(line: bytes) -> int:
    """Return the number of steps that a line tells; 0 for a line that is not whole, as a full disk
    or a power failure leaves one."""
    try:
        found = json.loads(line)
    except ValueError:
        return 0
    return int(found["step"]) if isinstance(found, dict) and "step" in found else 0
