"""Rates of a run, which nobody can know from its file: stated, or measured by an earlier run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from pathlib import Path
from typing import Any

from roll.commands.costs.expected import Expected, parse_numbers
from roll.commands.costs.work import Kind, work_of
from roll.config.errors import ConfigError
from roll.config.loading.compose import load_config
from roll.config.offline_base import OfflineConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.roles import Role
from roll.config.step_plan import sequences_of, trained_rows
from roll.output_dir.trackers.jsonl import read_records

KINDS: tuple[Kind, ...] = ("generate", "train", "score")
_SCORING = ("time/logprob_s", "time/values_s", "time/teach_s")

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a run, as far as they are known."""

    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """Kind of work -> tokens per second of all devices together."""
    step_s: float | None = None
    """Seconds of a step besides its work on tokens, such as the push of weights."""
    validation_s: float | None = None
    checkpoint_s: float | None = None
    measured: bool = False
    """True if an earlier run tells them: its phases have been timed one after another, so that
    those that overlap count once."""


def parse_rates(text: str) -> dict[str, float]:
    """Return the rates of `generate=3000,train=9000`; ConfigError if a name or number cannot be."""
    return parse_numbers("--rates", text, KINDS)


def measured_by(folder: Path) -> tuple[RunConfig, Rates, Expected]:
    """Return the settings of an earlier run, its rates, and the mean lengths of its rows.

    Raises:
        ConfigError: the folder is that of no run, or the run has finished no step.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"--from {folder}: no output_dir of a run: it has no config.yaml")
    config = load_config(folder / "config.yaml", import_code=False).config
    records = read_records(folder / "metrics.jsonl")
    steps = [record for record in records if "time/step_s" in record]
    if not steps:
        raise ConfigError(f"--from {folder}: the run has finished no step, so it tells no rates")
    expected = _lengths(config, steps)
    return config, _rates(config, records, steps, expected), expected


def _rates(config: RunConfig, records: Records, steps: Records, expected: Expected) -> Rates:
    """Return the rates that records tell."""
    scored = [w.mean for w in work_of(config, expected) if w.kind == "score" and not w.validates]
    tokens: dict[Kind, float] = {
        "generate": _total(steps, "rollout/generated_tokens"),
        "train": fsum(map(_trained, steps)) + _trained_beside(config, expected) * len(steps),
        "score": fsum(mean for mean in scored if mean is not None) * len(steps),
    }
    seconds: dict[Kind, float] = {
        "generate": _total(steps, "time/rollout_s"),
        "train": _total(steps, "time/train_s"),
        "score": _total(steps, *_SCORING),
    }
    return Rates(
        {kind: tokens[kind] / seconds[kind] for kind in KINDS if tokens[kind] and seconds[kind]},
        (_total(steps, "time/step_s") - fsum(seconds.values())) / len(steps),
        _mean(records, "time/validate_s"),
        _mean(records, "time/checkpoint_s"),
        measured=True,
    )


def _lengths(config: RunConfig, steps: Records) -> Expected:
    """Return the mean lengths that the records of an earlier run tell."""
    learning = [record for record in steps if _trained(record)]
    trained = fsum(map(_trained, learning))
    if isinstance(config, OfflineConfig):
        rows = len(learning) * config.data.rows_per_step * sequences_of(config)
        return Expected(row=trained / rows if rows else None)
    assert isinstance(config, RlvrBase)
    samples = config.samples_per_step * len(steps)
    response = _total(steps, "response_tokens/mean") / len(steps)
    generated = _total(steps, "rollout/generated_tokens")
    epochs = config.actor_train.epochs
    rows = trained_rows(config, config.samples_per_step) * epochs * len(learning)
    return Expected(
        prompt=trained / rows - response if rows else None,
        response=response,
        generated=generated / samples if generated else None,
    )


def _trained(record: Mapping[str, Any]) -> float:
    """Return the tokens that the policy was trained on in a step, all passes together."""
    return float(record.get("perf/trained_tokens_per_s", 0.0) * record.get("time/train_s", 0.0))


def _trained_beside(config: RunConfig, expected: Expected) -> float:
    """Return the tokens that roles other than the policy are trained on in a step. No record has
    their number, but `time/train_s` has their time, too."""
    if not isinstance(config, RlvrBase) or expected.prompt is None or expected.response is None:
        return 0.0
    row = expected.prompt + expected.response
    beside = [each for role, each in config.trained.items() if role is not Role.ACTOR_TRAIN]
    return fsum(config.samples_per_step * each.epochs * row for each in beside)


def _total(records: Iterable[Mapping[str, Any]], *names: str) -> float:
    return fsum(record.get(name, 0.0) for record in records for name in names)


def _mean(records: Records, name: str) -> float | None:
    found = [record[name] for record in records if name in record]
    return fsum(found) / len(found) if found else None
