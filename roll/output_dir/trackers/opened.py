"""The trackers of a run: which there are, and what becomes of one that fails."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from roll.config.sections.lifecycle import SERVICES, TrackConfig, TrackerConfig
from roll.config.user_code.arguments import check_arguments
from roll.config.user_code.import_path import load_object
from roll.config.user_code.tracebacks import users_place, users_traceback
from roll.core.errors import EngineMissingError
from roll.output_dir.trackers.behind import CLOSED, Behind, EarlierError, at_step
from roll.output_dir.trackers.console import ConsoleTracker
from roll.output_dir.trackers.interface import Record, TrackedRun, Tracker
from roll.output_dir.trackers.jsonl import JsonlTracker
from roll.output_dir.trackers.services import CLASSES
from roll.output_dir.trackers.tensorboard import TensorBoardTracker

logger = logging.getLogger(__name__)


class Trackers:
    """All trackers of a run, by name, behind one `log` method. One that fails is logged and left
    out from then on; leaving the block closes the others."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self.failed: list[str] = []
        """A line on each tracker that has failed: its name, when, the error and its place."""

    def log(self, step: int, record: Record) -> None:
        """Pass the record of a step to all trackers that have not failed; never raise."""
        self._each(lambda tracker: tracker.log(step, record), at_step(step))

    def _each(self, act: Callable[[Tracker], None], when: str) -> None:
        """Call `act` for each tracker; log an error, and leave its tracker out from then on.

        Args:
            when: the call, in words.
        """
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except EarlierError as earlier:
                self._switch_off(name, earlier.when, earlier.error)
            except Exception as error:  # noqa: BLE001 - a full disk must not end the run
                self._switch_off(name, when, error)

    def _switch_off(self, name: str, when: str, error: Exception) -> None:
        """Leave a tracker out from now on; log when and where it failed, with the traceback from
        the user's first line on."""
        del self._trackers[name]
        place = users_place(error)
        where = f" ({place})" if place else ""
        what = " ".join(f"{type(error).__name__}: {error}".splitlines())
        self.failed.append(f"{name} failed {when}: {what}{where}")
        logger.error(
            "the tracker %s failed %s%s and is switched off; the run goes on\n%s",
            *(name, when, where, users_traceback(error)),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._each(lambda tracker: tracker.close(), CLOSED)


def check_trackers(config: TrackConfig) -> None:
    """Raise EngineMissingError if the package of a service is not installed."""
    for tracker in config.trackers:
        service = tracker.kind
        if service in SERVICES and importlib.util.find_spec(service) is None:
            raise EngineMissingError(
                f"track.trackers: {service} is not installed: `pip install {service}`"
            )


def open_trackers(
    config: TrackConfig,
    output_dir: Path,
    *,
    first_step: int,
    max_steps: int,
    resolved: Mapping[str, Any],
    phase: Callable[[], str] = lambda: "",
) -> Trackers:
    """Open the trackers that `config` names; records before `first_step` are kept, later ones
    dropped.

    Args:
        output_dir: folder of the run, which must exist.
        max_steps: last step of the run, for the progress bar.
        resolved: settings of the run, which services show.
        phase: function that returns the phase of the step which is under way.

    Raises:
        EngineMissingError: the package of a service is not installed.
        ConfigError: the class of a tracker does not exist, or takes other arguments.
    """
    trackers: dict[str, Tracker] = {
        "metrics.jsonl": JsonlTracker(output_dir / "metrics.jsonl", first_step=first_step)
    }
    if config.tensorboard:
        trackers["event files"] = TensorBoardTracker(
            output_dir / "tensorboard", first_step=first_step
        )
    check_trackers(config)
    for i, (name, wanted) in enumerate(_named(config)):
        folder = output_dir / "trackers" / name
        folder.mkdir(parents=True, exist_ok=True)
        title = wanted.name or "-".join(output_dir.parts[-2:])
        run = TrackedRun(folder, wanted.project, title, resolved, first_step)
        make = CLASSES.get(wanted.kind) or load_object(wanted.kind)
        key = f"track.trackers.{i}.kwargs"
        check_arguments(make, 1, wanted.kwargs, where=key, what=wanted.kind)
        trackers[name] = Behind(partial(make, run, **wanted.kwargs))
    trackers["the terminal"] = ConsoleTracker(
        first_step=first_step, max_steps=max_steps, phase=phase
    )
    return Trackers(trackers)


def _named(config: TrackConfig) -> Iterator[tuple[str, TrackerConfig]]:
    """Yield the further trackers with a name each: the service or class, from the second of a kind
    on with a number."""
    counts: dict[str, int] = {}
    for tracker in config.trackers:
        kind = tracker.kind.rpartition(":")[2]
        counts[kind] = counts.get(kind, 0) + 1
        yield kind if counts[kind] == 1 else f"{kind}-{counts[kind]}", tracker
