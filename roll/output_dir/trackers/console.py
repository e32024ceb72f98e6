"""The terminal: one line per step, warning signs, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from roll.output_dir.trackers.interface import Record
from roll.output_dir.warning_signs import Lookout


class ConsoleTracker:
    """Tracker that prints one line per step, and warning signs, above a progress bar with the time
    left, the phase of the step and the tokens per second; without a terminal only the lines."""

    def __init__(
        self, *, first_step: int, max_steps: int, phase: Callable[[], str] = lambda: ""
    ) -> None:
        """Show the progress bar, with `first_step` of `max_steps` steps done.

        Args:
            phase: function that returns the phase which is under way.
        """
        self.console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            _Phase(phase),
            TextColumn("{task.fields[rate]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._max_steps = max_steps
        self._lookout = Lookout()
        self._task = self._progress.add_task(
            "training", total=max_steps, completed=first_step, rate=""
        )
        self._progress.start()

    def log(self, step: int, record: Record) -> None:
        """Print warning signs and the line of the step, and move the progress bar on."""
        for said in self._lookout.look(record):
            self.console.print(f"step {step}: {said}", style="yellow", soft_wrap=True, markup=False)
        self.console.print(
            step_line(step, self._max_steps, record), highlight=False, soft_wrap=True
        )
        rate = next((f"{record[name]:,.0f} tokens/s" for name in _RATE if name in record), "")
        self._progress.update(self._task, completed=min(step + 1, self._max_steps), rate=rate)

    def close(self) -> None:
        self._progress.stop()


class _Phase(ProgressColumn):
    """Column with the phase that is under way, asked for each time the bar is drawn."""

    max_refresh = None

    def __init__(self, phase: Callable[[], str]) -> None:
        super().__init__()
        self._phase = phase

    def render(self, task: Task) -> Text:
        """Return the phase."""
        return Text(self._phase().replace("_", " "), style="cyan")


_RATE = ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s")
"""Metrics of which the first that a record has is shown beside the bar."""
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
    list if there are fewer than two parts. The score of a reward that is the only one is left out:
    it is the mean that the line shows already."""
    scores = [
        name
        for name in record
        if name.startswith("reward/") and name.endswith("/mean") and name.count("/") == 2
    ]
    repeated = scores[0] if len(scores) == 1 and record[scores[0]] == record["reward/mean"] else ""
    shown = [
        f"{escape(name.removeprefix('reward/').removesuffix('/mean'))} {value:.3f}"
        for name, value in record.items()
        if name.startswith("reward/")
        and not name.startswith("reward/tag/")
        and not name.endswith(_RATES)
        and name not in ("reward/mean", "reward/std", repeated)
    ]
    if len(shown) < (1 if repeated else 2):
        return []
    more = ["..."] if len(shown) > MAX_PARTS else []
    return [f"({', '.join([*shown[:MAX_PARTS], *more])})"]
