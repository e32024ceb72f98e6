"""Trackers that send the metrics to a service, by the service's own package.

A run that is resumed goes on in the same run of the service.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from roll.output_dir.trackers.clearml import ClearmlTracker
from roll.output_dir.trackers.interface import Record, TrackedRun, Tracker


class _RunTracker:
    """Tracker whose service has a run with `log` and `finish`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, record: Record) -> None:
        self._run.log(dict(record), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(_RunTracker):
    """Tracker that sends the metrics to Weights & Biases."""

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        """Begin a run, or go on with that of the earlier sessions; `kwargs` are those of
        `wandb.init`."""
        import wandb

        super().__init__(
            wandb.init(
                **{
                    "project": run.project,
                    "name": run.name,
                    "dir": run.folder,
                    "id": run.own_id(),
                    "resume": "allow",
                    "config": dict(run.config),
                    **kwargs,
                }
            )
        )


class MlflowTracker:
    """Tracker that sends the metrics to an MLflow server, or to a database of MLflow."""

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        """Begin a run in the experiment `run.project`, or go on with that of the earlier sessions;
        `kwargs` are those of `MlflowClient`, such as `tracking_uri`."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(**kwargs), Metric
        known = run.recall()
        if known is None:
            found = self._client.get_experiment_by_name(run.project)
            where = found.experiment_id if found else self._client.create_experiment(run.project)
            self._id = self._client.create_run(where, run_name=run.name).info.run_id
            run.remember(self._id)
            settings = [Param(name, value) for name, value in mlflow_settings(run.config).items()]
            for first in range(0, len(settings), _MLFLOW_PARAMS):
                self._client.log_batch(self._id, params=settings[first : first + _MLFLOW_PARAMS])
        else:
            self._id = known
            self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, record: Record) -> None:
        """Send the metrics; MLflow allows only some characters in their names, so that
        `val/x/mean@1` becomes `val/x/mean:1`."""
        now_ms = int(time.time() * 1000)
        metrics = [
            self._metric(_mlflow_name(name), value, now_ms, step) for name, value in record.items()
        ]
        for first in range(0, len(metrics), _MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MLFLOW_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._id)


_NOT_IN_MLFLOW = re.compile(r"[^\w./ :-]")
_MLFLOW_METRICS, _MLFLOW_PARAMS, _MLFLOW_TEXT, _MLFLOW_NAME = 1000, 100, 6000, 250
"""Limits of MLflow: metrics and parameters of one call, characters of a parameter and of a name."""


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow takes for a metric or a parameter."""
    return _NOT_IN_MLFLOW.sub(":", name)[:_MLFLOW_NAME]


def mlflow_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return each single setting by a name that MLflow takes. Of names that are then equal, later
    ones end with a number, because MLflow refuses a second value of a parameter."""
    found: dict[str, str] = {}
    for name, value in flat(settings):
        key = _mlflow_name(name)
        if key in found:
            number = f":{len(found)}"
            key = key[: _MLFLOW_NAME - len(number)] + number
        found[key] = value[:_MLFLOW_TEXT]
    return found


def flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each single setting as dotted name and text; a list is one setting."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", str(value)


class SwanLabTracker(_RunTracker):
    """Tracker that sends the metrics to SwanLab."""

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        """Begin an experiment, or go on with that of the earlier sessions; `kwargs` are those of
        `swanlab.init`."""
        import swanlab

        super().__init__(
            swanlab.init(
                **{
                    "project": run.project,
                    "name": run.name,
                    "log_dir": str(run.folder),
                    "id": run.own_id(),
                    "resume": "allow",
                    "config": dict(run.config),
                    **kwargs,
                }
            )
        )


class TrackioTracker(_RunTracker):
    """Tracker that keeps the metrics in Trackio's database, or sends them to a Space."""

    def __init__(self, run: TrackedRun, **kwargs: Any) -> None:
        """Begin a run, or go on with that of the earlier sessions; `kwargs` are those of
        `trackio.init`. Trackio knows runs by name alone, so the name ends with an id."""
        import trackio

        super().__init__(
            trackio.init(
                **{
                    "project": run.project,
                    "name": f"{run.name}-{run.own_id()}",
                    "config": dict(run.config),
                    "resume": "allow",
                    "embed": False,
                    **kwargs,
                }
            )
        )


CLASSES: Mapping[str, Callable[..., Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
    "clearml": ClearmlTracker,
}
"""`kind` of a tracker -> its class."""
