"""How soon anybody could be done who knows all lengths: a lower bound, so nothing can beat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulation.engine import PROMPT_TOKENS, EngineModel


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step trained on."""

    tokens: int
    """Of all responses."""
    longest: int
    """Tokens of the longest response."""
    prompts: int


@dataclass(frozen=True, slots=True)
class Oracle:
    """A fleet in which nothing fails and a trainer that takes `train_s` for each step."""

    replicas: int
    model: EngineModel
    train_s: float
    staleness: int
    """A step trains on nothing that was begun on weights more than this many steps older."""

    def begins_s(self, work: Sequence[StepWork]) -> list[float]:
        """The earliest moment at which each step's training can begin, in seconds from the start.

        Nothing of step s can be begun before the weights s - staleness are there. From then on the
        longest response needs its time at full pace; and all the work of that step and those after
        it, prefill and pauses for new weights included, needs its time at full throughput. What
        the oracle gains by order, by placement or by luck is contained in these three.
        """
        begins: list[float] = []
        released: list[float] = []
        """From when on each step's responses may be begun."""
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
        """Until the weights of the last step are published."""
        return self._published_s(self.begins_s(work)[-1])

    def _published_s(self, begin_s: float) -> float:
        return begin_s + self.train_s + self.model.pause_s

    def _throughput_s(self, work: StepWork) -> float:
        """Seconds of the whole fleet."""
        prefill_s = work.prompts * PROMPT_TOKENS / self.model.prefill_tokens_per_s
        return (work.tokens / self.model.max_tokens_per_s + prefill_s) / self.replicas
