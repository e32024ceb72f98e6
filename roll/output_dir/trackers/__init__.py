"""Trackers, which store or show the metrics of a run. A tracker that fails is switched off, and the
run continues."""

from roll.output_dir.trackers.console import ConsoleTracker, step_line
from roll.output_dir.trackers.interface import Record, TrackedRun, Tracker
from roll.output_dir.trackers.jsonl import JsonlTracker, read_records
from roll.output_dir.trackers.opened import Trackers, check_trackers, open_trackers

__all__ = [
    "ConsoleTracker",
    "JsonlTracker",
    "Record",
    "TrackedRun",
    "Tracker",
    "Trackers",
    "check_trackers",
    "open_trackers",
    "read_records",
    "step_line",
]
