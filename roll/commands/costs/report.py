"""Table and lines of `roll check` about the costs of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum

from roll.commands.costs.expected import Expected
from roll.commands.costs.rates import KINDS, Rates
from roll.commands.costs.work import (
    Work,
    most_groups,
    num_checkpoints,
    num_steps,
    num_validations,
    work_of,
)
from roll.config.agentic_base import AgenticBase
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.placement import parse_devices

HOUR_S = 3600.0
AT_MOST = ("tokens", "times", "each, at most", "the run, at most")
AS_EXPECTED = ("each, expected", "the run, expected")


@dataclass(frozen=True, slots=True)
class Hours:
    """Time of a run, in hours."""

    parts: dict[str, float]
    """Kind of work, or what else takes time -> hours."""
    overlap: bool
    """True if generation goes on while the rest is done."""

    @property
    def all(self) -> float:
        """Hours of the run. Where generation and the rest overlap, the longer of the two."""
        generating = self.parts.get("generate", 0.0)
        rest = fsum(hours for part, hours in self.parts.items() if part != "generate")
        return max(generating, rest) if self.overlap else generating + rest


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a run, as far as they are known."""

    config: RunConfig
    expected: Expected
    rates: Rates
    price: float | None = None
    """Price of a device for an hour; None: not stated."""

    @property
    def work(self) -> list[Work]:
        return work_of(self.config, self.expected)

    @property
    def num_devices(self) -> int:
        """Number of devices that the run has from its begin to its end."""
        pools = self.config.pools.values()
        return len({device for pool in pools for device in parse_devices(pool)})

    def hours(self, *, most: bool) -> Hours | None:
        """Return how long a run takes by its rates; None if a part that has a rate has no size.

        Args:
            most: count the largest numbers of tokens, not the expected ones.
        """
        found: dict[str, float] = {}
        for work in self._timed():
            tokens = work.run_most if most else work.run_mean
            if tokens is None:
                return None
            rate = self.rates.tokens_per_s[work.kind]
            found[work.kind] = found.get(work.kind, 0.0) + tokens / rate / HOUR_S
        if not found:
            return None
        for name, seconds, times in self._others():
            if seconds is not None and times:
                found[name] = seconds * times / HOUR_S
        return Hours(found, self._overlaps())

    @property
    def unrated(self) -> list[str]:
        """Names of the work that no rate tells the time of."""
        timed = self._timed()
        others = [work for work in self.work if work not in timed]
        whole = self.rates.validation_s is not None
        return [work.name for work in others if not (work.validates and whole)]

    def _timed(self) -> list[Work]:
        """Return the work with a rate; that of validations only if it can be counted, and if their
        time is not known as a whole."""
        rated = [work for work in self.work if work.kind in self.rates.tokens_per_s]
        whole = self.rates.validation_s is not None
        return [w for w in rated if not (w.validates and (whole or w.most is None))]

    def _others(self) -> Iterator[tuple[str, float | None, int | None]]:
        """Yield what takes time besides tokens, with the seconds of each time and their number."""
        config, expected, rates = self.config, self.expected, self.rates
        yield "other", rates.step_s, num_steps(config, expected)
        yield "validations", rates.validation_s, num_validations(config, expected)
        yield "checkpoints", rates.checkpoint_s, num_checkpoints(config, expected)

    def _overlaps(self) -> bool:
        """Return whether rates count generation and the rest twice where both go on at once."""
        config = self.config
        return (
            not self.rates.measured
            and isinstance(config, RlvrBase)
            and config.rollout.max_staleness > 0
        )


def table_of(costs: Costs) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the headings and rows of the table of tokens, the expected ones if they are known."""
    work = costs.work
    means = any(each.mean is not None for each in work)
    rows = []
    for each in work:
        row = [each.name, "-" if each.times is None else f"{each.times:,}"]
        row += [_count(each.most), _count(each.run_most)]
        rows.append((*row, *([_count(each.mean), _count(each.run_mean)] if means else [])))
    return (*AT_MOST, *(AS_EXPECTED if means else ())), rows


def lines_of(costs: Costs) -> Iterator[str]:
    """Yield what is to be said beside the table: samples, updates, hours and money."""
    config = costs.config
    steps = num_steps(config, costs.expected)
    if steps is None:
        yield (
            "the run ends with its epochs, whose steps depend on the number of rows: "
            "--expect train_rows=N counts them"
        )
    else:
        made, updates = "", steps
        if isinstance(config, RlvrBase):
            made = f"{steps * config.samples_per_step:,} samples and "
            updates = config.total_updates()
        yield f"the run: {steps:,} steps, {made}{updates:,} optimizer steps"
    yield from _bounds(config)
    if any(work.validates and work.most is None for work in costs.work):
        yield (
            "validations are not counted: the number of their rows is not known here; "
            "--expect validation_rows=N counts them"
        )
    yield from _time_lines(costs)


def _bounds(config: RunConfig) -> Iterator[str]:
    """Yield what the largest number of generated tokens includes, and what it leaves out."""
    if not isinstance(config, RlvrBase) or not config.generates:
        return
    wanted, most = config.data.prompts_per_step, most_groups(config)
    if most > wanted:
        yield (
            f"generated at most: {most:,} groups a step for {wanted:,} that are trained on, as "
            "many as may be rejected, aborted or begun again; expected: none, unless measured"
        )
    if isinstance(config, AgenticBase):
        anew = [
            f"{each.history} of {name}"
            for name, each in config.environments.items()
            if each.history != "keep"
        ]
        if anew:
            yield (
                "not counted: further rows of an episode, where its context begins anew (history: "
                f"{', '.join(anew)})"
            )


def _time_lines(costs: Costs) -> Iterator[str]:
    """Yield how long the run takes and what that costs, as far as rates are known."""
    if not costs.rates.tokens_per_s:
        return
    for label, most in (("at most", True), ("expected", False)):
        hours = costs.hours(most=most)
        if hours is None:
            continue
        parts = [f"{name} {_hours(hours.parts[name])}" for name in _in_order(hours)]
        joined = (" | " if hours.overlap else " + ").join(parts)
        yield f"hours, {label}: {_hours(hours.all)} ({joined})"
        if costs.price is not None:
            spent = hours.all * costs.num_devices * costs.price
            yield (
                f"price, {label}: {spent:,.2f} ({costs.num_devices} device(s) x "
                f"{_hours(hours.all)} h x {costs.price:g})"
            )
    if costs.unrated:
        yield f"not in these hours, for lack of a rate: {', '.join(costs.unrated)}"


def _in_order(hours: Hours) -> Sequence[str]:
    return [*(k for k in KINDS if k in hours.parts), *(k for k in hours.parts if k not in KINDS)]


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _count(tokens: float | None) -> str:
    """Return a number of tokens as text; a dash if it is not known."""
    if tokens is None:
        return "-"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if tokens >= 10 * size:
            return f"{tokens / size:,.1f} {unit}"
    return f"{tokens:,.0f}"
