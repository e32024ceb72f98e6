"""Synchronous and asynchronous runs of one fleet, next to what an oracle would make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.simulation.oracle import Oracle
from benchmarks.simulation.world import Outcome, Scenario, simulate

CALIBRATION_STEPS = 3


@dataclass(frozen=True)
class Row:
    """One run and what it is compared with."""

    outcome: Outcome
    synchronous_step_s: float
    """Of the same fleet and trainer."""

    @property
    def speedup(self) -> float:
        """Throughput, relative to synchronous steps."""
        return self.synchronous_step_s / self.outcome.step_s

    @property
    def of_oracle(self) -> float:
        """Utilisation, relative to the oracle's on the same work: the ratio of the times."""
        scenario = self.outcome.scenario
        oracle = Oracle(scenario.replicas, scenario.model, scenario.train_s, scenario.staleness)
        return oracle.makespan_s(self.outcome.work) / self.outcome.makespan_s

    @property
    def staleness_shares(self) -> dict[int, float]:
        """Of the tokens trained on."""
        total = sum(self.outcome.staleness.values())
        return {steps: count / total for steps, count in self.outcome.staleness.items()}

    @property
    def mean_staleness(self) -> float:
        """In steps, over tokens."""
        return sum(steps * share for steps, share in self.staleness_shares.items())


def calibrated(scenario: Scenario, generation_share: float) -> Scenario:
    """With a trainer so fast that generation takes this share of a synchronous step, when nothing
    goes wrong."""
    alone = replace(scenario, staleness=0, train_s=0.0, steps=CALIBRATION_STEPS)
    outcome = simulate(replace(alone, faults=replace(alone.faults, mean_between_s=float("inf"))))
    generation_s = outcome.step_s - scenario.model.pause_s
    rest_s = generation_s * (1 - generation_share) / generation_share
    return replace(scenario, train_s=max(0.0, rest_s - scenario.model.pause_s))


def study(scenario: Scenario, staleness: Sequence[int], generation_share: float) -> Iterator[Row]:
    """A synchronous run, and one for each of `staleness` above 0, in ascending order."""
    scenario = calibrated(scenario, generation_share)
    synchronous = simulate(replace(scenario, staleness=0))
    for steps in sorted({0, *staleness}):
        outcome = simulate(replace(scenario, staleness=steps)) if steps else synchronous
        yield Row(outcome, synchronous.step_s)
