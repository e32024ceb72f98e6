"""Lower bound of the time of a run, which even a scheduler that knows all lengths cannot beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulation.engine import PROMPT_TOKENS, EngineModel


@dataclass(frozen=True, slots=True)
class StepWork:
    """Amount of generation that one step trained on."""

    tokens: int
    """Number of tokens of all responses."""
    longest: int
    """Number of tokens of the longest response."""
    prompts: int


@dataclass(frozen=True, slots=True)
class Oracle:
    """Ideal fleet, in which nothing fails, with a trainer that takes `train_s` for each step."""

    replicas: int
    model: EngineModel
    train_s: float
    staleness: int
    """Largest age of the weights on which a response was begun, in steps before the step that
    trains on it."""

    def begins_s(self, work: Sequence[StepWork]) -> list[float]:
        """Return the earliest time at which the training of each step can begin, in seconds from
        the start.

        Three bounds hold, whatever the order and placement of requests. No response of step s can
        be begun before the weights of version s - staleness are there. From then on, the longest
        response of the step needs its time at full pace. And from the release of each earlier step
        on, all work of the steps from that one to s, with prefill and pauses for new weights, needs
        its time at full throughput.
        """
        begins: list[float] = []
        released: list[float] = []
        """Time from which on the responses of each step may be begun, in seconds."""
        for step, own in enumerate(work):
            newest = step - self.staleness - 1
            released.append(self._published_s(begins[newest]) if newest >= 0 else 0.0)
            begin_s = max(
                self._published_s(begins[-1]) if begins else 0.0,
                released[step] + own.longest / self.model.tokens_per_s,
            )
            total_s = 0.0
            for first in range(step, -1, -1):
                total_s += self._throughput_s(work[first])
                pauses_s = (step - first) * self.model.pause_s
                begin_s = max(begin_s, released[first] + total_s + pauses_s)
            begins.append(begin_s)
        return begins

    def makespan_s(self, work: Sequence[StepWork]) -> float:
        """Return the time until the engines have the weights of the last step, in seconds."""
        return self._published_s(self.begins_s(work)[-1])

    def _published_s(self, begin_s: float) -> float:
        return begin_s + self.train_s + self.model.pause_s

    def _throughput_s(self, work: StepWork) -> float:
        """Return the seconds that the whole fleet needs for this work at full throughput."""
        prefill_s = work.prompts * PROMPT_TOKENS / self.model.prefill_tokens_per_s
        return (work.tokens / self.model.max_tokens_per_s + prefill_s) / self.replicas
