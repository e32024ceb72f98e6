"""Curriculum by pass rate: which prompts and sources are drawn more often, from what came of them.

The outcomes of a step take effect together, when the step has its groups. So the prompts of a step
do not depend on which group of the step before ended first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from roll.config.sections.data import CurriculumConfig, OwnCurriculumConfig
from roll.config.user_code.calls import OwnCode
from roll.core.errors import CheckpointError, DataError
from roll.core.metrics import Last, Mean, Metric, Metrics, Sum
from roll.core.types import Prompt
from roll.data.own.curriculum import Curriculum as OwnCurriculum
from roll.data.own.curriculum import Seen

KEY = "data.curriculum"


@dataclass
class Curriculum:
    """Recent pass rates of prompts and sources, and the preferences that follow from them."""

    config: CurriculumConfig | OwnCurriculumConfig
    seed: int
    rates: dict[str, float] = field(default_factory=dict)
    """Id of a prompt -> recent pass rate, in 0..1. A prompt without a rate is always taken."""
    source_rates: dict[str, float] = field(default_factory=dict)
    """Name of a source -> recent pass rate of its prompts."""
    metrics: Metrics = field(default_factory=Metrics, init=False)
    """Metrics of the last step that ended; a new object for each step."""
    _outcomes: dict[str, tuple[float, int]] = field(default_factory=dict, init=False)
    """Id of a prompt -> sum and number of the pass rates of its groups since the last step."""
    _skipped: int = field(default=0, init=False)
    _steps: int = field(default=0, init=False)
    """Number of steps that have ended."""

    @property
    def changes_shares(self) -> bool:
        """True if the weights of sources follow their pass rates."""
        return self.config.sources

    def begin_with(self, prompts: Iterable[Prompt]) -> None:
        """Take the first pass rates from the column that the config names, if it names one.

        Raises:
            DataError: a row has no number from 0 to 1 there.
        """
        column = self.config.column
        for prompt in prompts if column is not None else ():
            value = prompt.extra.get(column or "")
            if not isinstance(value, Real) or not 0 <= float(value) <= 1:
                raise DataError(
                    f"row {prompt.id}: column {column!r} of data.curriculum has {value!r:.40}; "
                    "expected a pass rate, a number from 0 to 1"
                )
            self.rates[prompt.id] = float(value)

    def preference(self, rate: float | None) -> float:
        """Return the chance that a prompt with this recent pass rate is taken when its turn comes:
        1 from `low` to `high` and for None, falling linearly to `outside` at 0 and at 1."""
        assert isinstance(self.config, CurriculumConfig), "one's own curriculum has no band"
        low, high, outside = self.config.low, self.config.high, self.config.outside
        if rate is None or low <= rate <= high:
            return 1.0
        inside = rate / low if rate < low else (1 - rate) / (1 - high)
        return outside + (1 - outside) * inside

    def takes(self, prompt: Prompt, epoch: int) -> bool:
        """Return whether a prompt is drawn when its turn comes in this epoch; count it if not.

        The coin depends on seed, prompt and epoch alone.
        """
        wanted = self._chance(prompt, epoch)
        taken = wanted >= 1 or random.Random(f"{self.seed}:{epoch}:{prompt.id}").random() < wanted
        self._skipped += not taken
        return taken

    def source_preference(self, name: str) -> float:
        """Return the factor of the weight of a source; 1 if sources have fixed weights."""
        if not self.config.sources:
            return 1.0
        rate, own = self.source_rates.get(name), self.config
        if not isinstance(own, OwnCurriculum):
            return self.preference(rate)
        code = OwnCode(own, KEY)
        factor = code.call(own.source_factor, f" for source {name}", name, rate)
        usable = isinstance(factor, Real) and 0 < factor < math.inf
        code.require(usable, f"{factor!r:.40} for source {name}", "a factor above zero")
        return float(factor)

    def _chance(self, prompt: Prompt, epoch: int) -> float:
        """Return the chance that a prompt is taken."""
        rate, own = self.rates.get(prompt.id), self.config
        if not isinstance(own, OwnCurriculum):
            return self.preference(rate)
        code, seen = OwnCode(own, KEY), Seen(rate, self._steps, epoch)
        chance = code.call(own.chance, f" for prompt {prompt.id}", prompt, seen)
        usable = isinstance(chance, Real) and 0 <= chance <= 1
        code.require(usable, f"{chance!r:.40} for prompt {prompt.id}", "a chance from 0 to 1")
        return float(chance)

    def observe(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Note the rewards of a group that a step takes or a filter rejected; nothing if there are
        none."""
        if rewards:
            passed = sum(reward >= self.config.pass_score for reward in rewards) / len(rewards)
            total, count = self._outcomes.get(prompt.id, (0.0, 0))
            self._outcomes[prompt.id] = total + passed, count + 1

    def end_step(self) -> None:
        """Let the outcomes noted since the last call take effect."""
        of_sources: dict[str, list[float]] = {}
        for name, (total, count) in sorted(self._outcomes.items()):
            self.rates[name] = self._mixed(self.rates.get(name), total / count)
            of_sources.setdefault(name.rpartition(":")[0], []).append(total / count)
        for source, rates in of_sources.items():
            mean = sum(rates) / len(rates)
            self.source_rates[source] = self._mixed(self.source_rates.get(source), mean)
        self._outcomes = {}
        self._steps += 1
        self.metrics = self._measured()
        self._skipped = 0

    def state(self) -> dict[str, Any]:
        """Return the pass rates, as plain JSON."""
        return {
            "rates": dict(self.rates),
            "sources": dict(self.source_rates),
            "outcomes": {name: list(pair) for name, pair in self._outcomes.items()},
            "skipped": self._skipped,
            "steps": self._steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; CheckpointError if it is of something else."""
        if state.keys() | {"steps"} != self.state().keys():  # earlier versions had no steps
            raise CheckpointError(f"not the state of a curriculum: keys {sorted(state)}")
        self.rates = {name: float(rate) for name, rate in state["rates"].items()}
        self.source_rates = {name: float(rate) for name, rate in state["sources"].items()}
        self._outcomes = {name: (float(s), int(n)) for name, (s, n) in state["outcomes"].items()}
        self._skipped = int(state["skipped"])
        self._steps = int(state.get("steps", 0))

    def _mixed(self, earlier: float | None, latest: float) -> float:
        """Return the recent pass rate after one more outcome; `earlier` is None if there was
        none."""
        memory = self.config.memory
        return latest if earlier is None else memory * earlier + (1 - memory) * latest

    def _measured(self) -> Metrics:
        """Return `curriculum/...`: known prompts, the share of them within `low` and `high` (if the
        curriculum has these), skipped prompts since the last step, the pass rate of each source."""
        found: dict[str, Metric] = {
            "curriculum/known_prompts": Last(len(self.rates)),
            "curriculum/skipped_prompts": Sum(self._skipped),
        }
        if isinstance(self.config, CurriculumConfig):
            low, high = self.config.low, self.config.high
            inside = sum(low <= rate <= high for rate in self.rates.values())
            found["curriculum/in_band_fraction"] = Mean(inside, len(self.rates))
        for name, rate in sorted(self.source_rates.items()):
            found[f"curriculum/source/{name}/pass_rate"] = Last(rate)
        return Metrics(found)
