"""Trackers, which store or show the metrics of a run. A tracker that fails is switched off, and the
run continues."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from roll.config.sections.lifecycle import TrackConfig
from roll.core.errors import EngineMissingError
from roll.output_dir.warning_signs import Lookout
from roll.output_dir.whole_file import replace_file

logger = logging.getLogger(__name__)

Record = Mapping[str, float]

_NO_WANDB = "track.wandb_project is set, but W&B is not installed: `pip install wandb`"


class Tracker(Protocol):
    """Receiver of one record per step."""

    def log(self, step: int, record: Record) -> None:
        """Store the metrics of one step, by name; may raise."""
        ...

    def close(self) -> None:
        """Finish; nothing is logged afterwards."""
        ...


class JsonlTracker:
    """Tracker that writes `metrics.jsonl`: one object per step, flushed before the next step
    begins."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Open the file for appending, without the records from `first_step` on, which the run
        makes again."""
        _drop_records(path, first_step)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def log(self, step: int, record: Record) -> None:
        """Append the record of a step to the file, with the step in it, and flush."""
        self._file.write(json.dumps({"step": step, **record}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _drop_records(path: Path, first_step: int) -> None:
    """Remove the records from `first_step` on from the file, and an incomplete line.

    The new content is written to another file, which is then renamed. If nothing changes, nothing
    is written. If the disk is full, all records stay and OSError is raised.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = []
    for line in text.splitlines(keepends=True):
        with suppress(json.JSONDecodeError):
            if line.endswith("\n") and json.loads(line)["step"] < first_step:
                kept.append(line)
    remaining = "".join(kept)
    if remaining == text:
        return
    replace_file(path, remaining)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics.jsonl; lines that are incomplete because of a kill are left
    out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


class TensorBoardTracker:
    """Tracker that writes event files for TensorBoard."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        """Open new event files in `folder`; TensorBoard then hides earlier values from `first_step`
        on."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, record: Record) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Tracker that sends the metrics to Weights & Biases."""

    def __init__(self, project: str, output_dir: Path, config: Mapping[str, Any]) -> None:
        """Begin a W&B run in the project.

        Args:
            output_dir: folder in which W&B keeps its files.
            config: settings that W&B shows with the run.

        Raises:
            EngineMissingError: W&B is not installed.
        """
        try:
            import wandb
        except ImportError:
            raise EngineMissingError(_NO_WANDB) from None
        self._run = wandb.init(project=project, dir=output_dir, config=dict(config))

    def log(self, step: int, record: Record) -> None:
        self._run.log(dict(record), step=step)

    def close(self) -> None:
        self._run.finish()


class ConsoleTracker:
    """Tracker that prints one line per step, and warning signs, above a progress bar; without a
    terminal only the lines."""

    def __init__(self, *, first_step: int, max_steps: int) -> None:
        """Show the progress bar, with `first_step` of `max_steps` steps done."""
        self.console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._max_steps = max_steps
        self._lookout = Lookout()
        self._task = self._progress.add_task("training", total=max_steps, completed=first_step)
        self._progress.start()

    def log(self, step: int, record: Record) -> None:
        """Print warning signs and the line of the step, and move the progress bar on."""
        for said in self._lookout.look(record):
            self.console.print(f"step {step}: {said}", style="yellow", soft_wrap=True, markup=False)
        self.console.print(
            step_line(step, self._max_steps, record), highlight=False, soft_wrap=True
        )
        self._progress.update(self._task, completed=min(step + 1, self._max_steps))

    def close(self) -> None:
        self._progress.stop()


_RATES = ("/error_rate", "/timeout_rate")
"""Ends of the names of metrics about calls of a reward, not about scores."""
MAX_PARTS = 6
"""Largest number of parts of a reward that the line of a step shows; metrics.jsonl has all."""

_COLUMNS: Sequence[tuple[str, str, str]] = (
    ("reward/mean", "reward", ".3f"),
    ("loss/total", "loss", "+.4f"),
    ("accuracy", "accuracy", ".3f"),
    ("kl/ref", "kl", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("grad_norm", "grad", ".2f"),
    ("response_tokens/mean", "tokens", ".1f"),
    ("mismatch/logprob_abs_max", "mismatch", ".1e"),
    ("time/step_s", "seconds", ".2f"),
)


def step_line(step: int, max_steps: int, record: Record) -> str:
    """Format the main metrics of a step as one line for the terminal.

    Example: step   3/60  reward 0.612  loss -0.0031  kl 0.0004 ...
    """
    parts = [f"step {step:>3}/{max_steps}"]
    for name, label, form in _COLUMNS:
        if name in record:
            parts.append(f"{label} {record[name]:{form}}")
            if name == "mismatch/logprob_abs_max" and (oldest := record.get("staleness/max")):
                # The age of the oldest tokens explains a part of the mismatch.
                parts.append(f"(of tokens up to {oldest:.0f} versions old)")
        if name == "reward/mean":
            parts += _reward_parts(record)
    parts += [
        f"[bold]{escape(name)} {value:.3f}[/bold]"
        for name, value in record.items()
        if name.startswith("val/") and ("@" in name or name.endswith(("/loss", "/accuracy")))
    ]
    return "  ".join(parts)


def _reward_parts(record: Record) -> list[str]:
    """Return the means of the reward's parts as one text in a list, cut after `MAX_PARTS`; an empty
    list if there are fewer than two parts."""
    shown = [
        f"{escape(name.removeprefix('reward/').removesuffix('/mean'))} {value:.3f}"
        for name, value in record.items()
        if name.startswith("reward/")
        and not name.startswith("reward/tag/")
        and not name.endswith(_RATES)
        and name not in ("reward/mean", "reward/std")
    ]
    if len(shown) < 2:
        return []
    more = ["..."] if len(shown) > MAX_PARTS else []
    return [f"({', '.join([*shown[:MAX_PARTS], *more])})"]


class Trackers:
    """All trackers of a run, behind one `log` method. One that fails is logged and left out from
    then on; leaving the block closes the others."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, record: Record) -> None:
        """Pass the record of a step to all trackers that have not failed; never raise."""
        self._each(lambda tracker: tracker.log(step, record))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        """Call `act` for each tracker; log an error, and leave its tracker out from then on."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception:  # a full disk or a lost W&B must not end the run
                logger.exception("%s failed and is switched off", type(tracker).__name__)
                self._trackers.remove(tracker)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._each(lambda tracker: tracker.close())


def check_trackers(config: TrackConfig) -> None:
    """Raise EngineMissingError if W&B is configured but not installed."""
    if config.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise EngineMissingError(_NO_WANDB)


def open_trackers(
    config: TrackConfig,
    output_dir: Path,
    *,
    first_step: int,
    max_steps: int,
    resolved: Mapping[str, Any],
) -> Trackers:
    """Open the trackers that `config` names; records before `first_step` are kept, later ones
    dropped.

    Args:
        output_dir: folder of the run, which must exist.
        max_steps: last step of the run, for the progress bar.
        resolved: settings of the run, which W&B shows.

    Raises:
        EngineMissingError: W&B is configured but not installed.
    """
    trackers: list[Tracker] = [JsonlTracker(output_dir / "metrics.jsonl", first_step=first_step)]
    if config.tensorboard:
        trackers.append(TensorBoardTracker(output_dir / "tensorboard", first_step=first_step))
    if config.wandb_project is not None:
        trackers.append(WandbTracker(config.wandb_project, output_dir, resolved))
    trackers.append(ConsoleTracker(first_step=first_step, max_steps=max_steps))
    return Trackers(trackers)
