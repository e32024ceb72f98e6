"""From the command line of `roll eval` to models, cells and engines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from roll.commands.eval.cells import Cell, cells_of
from roll.commands.eval.evaluate import evaluate
from roll.commands.eval.models import Examinee, find_models
from roll.commands.eval.results import Line
from roll.config.errors import nearest
from roll.config.evaluation import EvalConfig, QuestionSet
from roll.config.loading.question_sets import load_serving, set_file
from roll.config.sections.sampling import engine_sampling_problems
from roll.config.sections.training import InferRole
from roll.core.errors import ConfigError
from roll.platform.machine import count_gpus
from roll.strategy.available import check_engine

T = TypeVar("T", int, float)
OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
"""Begin of an argument that is a setting and no model."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments and options of the command, as they were written."""

    arguments: tuple[str, ...]
    """Models, and settings `KEY=VALUE`."""
    sets: str
    out: Path
    checkpoints: str = ""
    engine: str = "vllm"
    temperatures: str = ""
    samples: int | None = None


@dataclass(frozen=True, slots=True)
class Overrides:
    """Settings of the command line, by what they concern."""

    serving: list[str] = field(default_factory=list)
    """Those of how models are served."""
    sets: dict[str, list[str]] = field(default_factory=dict)
    """Name of a set -> those of the set."""


def run_evaluation(asked: Asked) -> list[Line]:
    """Evaluate what the command line asks for; return the lines of the table.

    Raises:
        RollError: an argument, a model or a set is wrong, or an engine failed.
    """
    out = asked.out.expanduser().absolute()
    files = _files(asked.sets)
    given = [text for text in asked.arguments if OVERRIDE.match(text) and not Path(text).exists()]
    overrides = _sorted(given, files)
    temperatures = _numbers("--temperature", asked.temperatures, float)
    cells = cells_of(files, temperatures, asked.samples, overrides.sets)
    steps = _numbers("--checkpoint", asked.checkpoints, int)
    named = [text for text in asked.arguments if text not in given]
    models = find_models(named, steps, out)
    if not models:
        raise ConfigError("no model is named; give a folder, a name on the hub, or a run")

    def config_of(model: Examinee) -> EvalConfig:
        return _serving(asked.engine, model, overrides.serving)

    serving = config_of(models[0])
    check_engine(serving.actor_infer.strategy.kind)
    _require_followed(cells, serving.actor_infer)
    return evaluate(models, cells, config_of, out)


def _require_followed(cells: Sequence[Cell], infer: InferRole) -> None:
    """Raise ConfigError if the engine cannot follow the sampling of a set."""
    for cell in cells:
        key, sampling = f"{cell.set_name}.sampling", cell.questions.sampling
        for problem in engine_sampling_problems(key, sampling, "actor_infer", infer.strategy):
            raise ConfigError(problem)


def _files(sets: str) -> dict[str, Path]:
    """Return name -> file of the sets in a list such as `gsm8k,my.yaml`.

    Raises:
        ConfigError: there is none, a set does not exist, or two have one name.
    """
    found: dict[str, Path] = {}
    for name in filter(None, (part.strip() for part in sets.split(","))):
        file = set_file(name)
        if file.stem in found:
            raise ConfigError(
                f"--sets: {found[file.stem]} and {file} both have the name {file.stem!r}, which "
                "their results are kept under; rename one of the files"
            )
        found[file.stem] = file
    if not found:
        raise ConfigError("--sets names no set, such as gsm8k or my.yaml")
    return found


def _sorted(given: Sequence[str], sets: Iterable[str]) -> Overrides:
    """Return settings by what they concern: `actor_infer.dtype=...` the engines, `sampling...=...`
    all sets, `gsm8k.sampling...=...` one of them.

    Raises:
        ConfigError: the first part of a key is none of these.
    """
    found = Overrides(sets={name: [] for name in sets})
    for text in given:
        first = re.split(r"[.=]", text, maxsplit=1)[0]
        if first in EvalConfig.model_fields:
            found.serving.append(text)
        elif first in QuestionSet.model_fields:
            for own in found.sets.values():
                own.append(text)
        elif first in found.sets:
            found.sets[first].append(text[len(first) + 1 :])
        else:
            known = [*EvalConfig.model_fields, *QuestionSet.model_fields, *found.sets]
            raise ConfigError(
                f"{text}: no setting begins with {first!r}{nearest(first, known)} (known: "
                f"{', '.join(known)})"
            )
    return found


def _numbers(option: str, text: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Return the numbers of a list such as `0,0.6`; ConfigError unless they are different numbers
    from 0 on."""
    found: list[T] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            number = kind(part)
        except ValueError:
            number = kind("-1")
        if not (number >= 0 and math.isfinite(number)) or number in found:
            raise ConfigError(f"{option} {text}: expected different numbers such as 1,2")
        found.append(number)
    return tuple(found)


def _serving(engine: str, model: Examinee, overrides: Sequence[str]) -> EvalConfig:
    """Return how a model is served: on all GPUs of this machine, unless `overrides` say other."""
    gpus = count_gpus()
    settings: dict[str, Any] = {
        "pools": {"all": f"0-{gpus - 1}" if gpus > 1 else "0"},
        "model": {"path": model.path},
        "actor_infer": {"pool": "all", "strategy": {"kind": engine}},
    }
    return load_serving(settings, overrides)
