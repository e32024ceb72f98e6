"""From the options of `roll check` to the costs of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

from roll.commands.costs.expected import Expected, parse_expected
from roll.commands.costs.rates import Rates, measured_by, parse_rates
from roll.commands.costs.report import Costs
from roll.commands.trials.result import Trial
from roll.config.errors import ConfigError
from roll.config.offline_base import OfflineConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of the command, as they were written."""

    rates: str = ""
    earlier: Path | None = None
    expect: str = ""
    price: float | None = None


def costs_of(config: RunConfig, asked: Asked) -> tuple[Costs, list[str]]:
    """Return what the options tell of the costs of a run, and remarks about it. Stated numbers win
    over measured ones.

    Raises:
        ConfigError: an option is wrong, or a price has no hours to be multiplied with.
    """
    rates, expected = Rates(), parse_expected(asked.expect, config)
    remarks: list[str] = []
    if asked.earlier is not None:
        then, rates, measured = measured_by(asked.earlier)
        if then.pipeline != config.pipeline:
            raise ConfigError(
                f"--from {asked.earlier}: a run of pipeline {then.pipeline} tells nothing about "
                f"one of {config.pipeline}"
            )
        expected = expected.over(measured)
        if above := expected.above(config):
            raise ConfigError(
                f"--from {asked.earlier}: its rows were longer than this run allows: "
                f"{', '.join(above)}; state shorter ones (--expect)"
            )
        if unlike := _unlike(then, config):
            remarks.append(
                f"the rates are those of {asked.earlier}, which had {'; '.join(unlike)}; they "
                "are taken as they are"
            )
    if asked.rates:
        stated = parse_rates(asked.rates)
        rates = replace(rates, tokens_per_s={**rates.tokens_per_s, **stated})
    if asked.price is not None and not rates.tokens_per_s:
        raise ConfigError(
            "--price needs hours: state rates (--rates generate=3000,train=9000), or name an "
            "earlier run that has measured them (--from OUTPUT_DIR)"
        )
    return Costs(config, expected, rates, asked.price), remarks


def with_rows(costs: Costs, trial: Trial) -> Costs:
    """Return costs that know the rows that a trial has seen, where nothing is stated or measured:
    their number, and the mean tokens of the first ones."""
    config = costs.config
    assert isinstance(config, RlvrBase | OfflineConfig)
    data: Any = config.data  # each pipeline has its own class; all have sources
    trained_on = {f"data.sources.{i}": source for i, source in enumerate(data.sources)}
    held_out = [f"validation.sets.{name}" for name in config.validation.sets]
    mean = None
    if trained_on.keys() <= trial.mean_tokens.keys():
        weights = {key: source.weight for key, source in trained_on.items()}
        total = fsum(weight * trial.mean_tokens[key] for key, weight in weights.items())
        mean = total / fsum(weights.values())
    seen = Expected(
        prompt=mean if isinstance(config, RlvrBase) else None,
        row=mean if isinstance(config, OfflineConfig) else None,
        train_rows=_sum_of(list(trained_on), trial.counted),
        validation_rows=_sum_of(held_out, trial.counted),
    )
    return replace(costs, expected=costs.expected.over(seen))


def _sum_of(keys: Sequence[str], counted: Mapping[str, int]) -> int | None:
    """Return the rows of these sources; None if some are not counted, or there are none."""
    return sum(counted[key] for key in keys) if keys and set(keys) <= counted.keys() else None


def _unlike(then: RunConfig, now: RunConfig) -> list[str]:
    """Return what rates depend on and two runs have different, as it was in the earlier one."""
    found = []
    if then.train_model.path != now.train_model.path:
        found.append(f"the model {then.train_model.path}")
    for name, role in then.roles.items():
        if name not in now.roles:
            found.append(f"the role {name}")
        elif then.num_devices(name) != now.num_devices(name):
            found.append(f"{then.num_devices(name)} device(s) of {name}")
        elif role.strategy != now.roles[name].strategy:
            found.append(f"another strategy of {name}")
    return found + [f"no role {name}" for name in now.roles if name not in then.roles]
