"""Synchronous and asynchronous runs of one fleet, compared with the bound of the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulation.oracle import Oracle
from benchmarks.simulation.world import Outcome, Scenario, simulate

CALIBRATION_STEPS = 3


@dataclass(frozen=True)
class Row:
    """Run, with the numbers that it is compared with."""

    outcome: Outcome
    synchronous_step_s: float
    """Time of a synchronous step of the same fleet and trainer, in virtual seconds."""

    @property
    def speedup(self) -> float:
        """Throughput of the run, relative to synchronous steps."""
        return self.synchronous_step_s / self.outcome.step_s

    @property
    def of_oracle(self) -> float:
        """Time of the oracle for the same work, divided by the time of the run; at most 1."""
        scenario = self.outcome.scenario
        oracle = Oracle(scenario.replicas, scenario.model, scenario.train_s, scenario.staleness)
        return oracle.makespan_s(self.outcome.work) / self.outcome.makespan_s

    @property
    def staleness_shares(self) -> dict[int, float]:
        """Staleness in steps -> share of the trained tokens."""
        total = sum(self.outcome.staleness.values())
        return {steps: count / total for steps, count in self.outcome.staleness.items()}

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the trained tokens, in steps."""
        return sum(steps * share for steps, share in self.staleness_shares.items())


def calibrated(scenario: Scenario, generation_share: float) -> Scenario:
    """Return the scenario with another `train_s`, chosen so that generation takes this share of a
    synchronous step without failures."""
    alone = replace(scenario, staleness=0, train_s=0.0, steps=CALIBRATION_STEPS)
    outcome = simulate(replace(alone, faults=replace(alone.faults, mean_between_s=float("inf"))))
    generation_s = outcome.step_s - scenario.model.pause_s
    rest_s = generation_s * (1 - generation_share) / generation_share
    return replace(scenario, train_s=max(0.0, rest_s - scenario.model.pause_s))


def study(
    scenario: Scenario, staleness: Sequence[int], generation_share: float | None
) -> Iterator[Row]:
    """Yield the results of a synchronous run, and of a run with each `staleness` above 0, in
    ascending order.

    Args:
        scenario: fleet and workload; its `staleness` is replaced.
        staleness: numbers of steps that generation may be ahead of training.
        generation_share: share of generation in a synchronous step, which replaces `train_s`; None
            to keep that.
    """
    if generation_share is not None:
        scenario = calibrated(scenario, generation_share)
    synchronous = simulate(replace(scenario, staleness=0))
    for steps in sorted({0, *staleness}):
        outcome = simulate(replace(scenario, staleness=steps)) if steps else synchronous
        yield Row(outcome, synchronous.step_s)
