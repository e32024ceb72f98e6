"""From the command line of `roll eval` to models, cells and engines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.commands.eval.asked import Asked, look_for
from roll.commands.eval.cells import Cell, cells_of
from roll.commands.eval.evaluate import evaluate
from roll.commands.eval.models import Examinee
from roll.commands.eval.results import Line
from roll.config.errors import nearest
from roll.config.evaluation import EvalConfig, QuestionSet
from roll.config.loading.question_sets import load_serving
from roll.config.sections.sampling import engine_sampling_problems
from roll.config.sections.training import InferRole
from roll.core.errors import ConfigError
from roll.platform.machine import count_gpus
from roll.strategy.installed import check_backend


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
    found = look_for(asked)
    overrides = _sorted(found.overrides, found.sets)
    cells = cells_of(found.sets, found.temperatures, asked.samples, overrides.sets)
    models = found.models

    def config_of(model: Examinee) -> EvalConfig:
        return _serving(asked.engine, model, overrides.serving)

    serving = config_of(models[0])
    check_backend(serving.actor_infer.strategy)
    _require_followed(cells, serving.actor_infer)
    return evaluate(models, cells, config_of, found.out)


def _require_followed(cells: Sequence[Cell], infer: InferRole) -> None:
    """Raise ConfigError if the engine cannot follow the sampling of a set."""
    for cell in cells:
        key, sampling = f"{cell.set_name}.sampling", cell.questions.sampling
        for problem in engine_sampling_problems(key, sampling, "actor_infer", infer.strategy):
            raise ConfigError(problem)


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


def _serving(engine: str, model: Examinee, overrides: Sequence[str]) -> EvalConfig:
    """Return how a model is served: on all GPUs of this machine, unless `overrides` say other."""
    gpus = count_gpus()
    settings: dict[str, Any] = {
        "pools": {"all": f"0-{gpus - 1}" if gpus > 1 else "0"},
        "model": {"path": model.path},
        "actor_infer": {"pool": "all", "strategy": {"kind": engine}},
    }
    return load_serving(settings, overrides)
