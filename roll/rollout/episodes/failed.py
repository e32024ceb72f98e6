"""Count of episodes whose environment failed, with a limit on their share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from roll.core.errors import EnvironmentFailedError


@dataclass
class FailedEpisodes:
    """Counters of one purpose, training or validation: episodes that ended and that failed, by the
    name of their environment."""

    limits: Mapping[str, float]
    """Largest share of failed episodes of each environment, in 0..1."""
    expected: Mapping[str, float] = field(default_factory=dict)
    """Number of episodes that the step expects, of each environment."""
    _ended: Counter[str] = field(default_factory=Counter, init=False)
    _failed: Counter[str] = field(default_factory=Counter, init=False)

    def begin_step(self, expected: Mapping[str, float]) -> None:
        """Count anew, for a step of about so many episodes of each environment. Episodes that run
        meanwhile count in this step."""
        self.expected = expected
        self._ended.clear()
        self._failed.clear()

    def count(self, name: str, failure: str | None) -> None:
        """Count an episode that has ended.

        Args:
            name: name of its environment.
            failure: why it failed after all tries; None if it did not.

        Raises:
            EnvironmentFailedError: more of the expected episodes failed than the limit allows.
        """
        self._ended[name] += 1
        if failure is None:
            return
        self._failed[name] += 1
        ended, failed, limit = self._ended[name], self._failed[name], self.limits[name]
        among = max(ended, round(self.expected.get(name, 0)))
        if failed > limit * among + 1e-9:  # the tolerance only absorbs rounding
            raise EnvironmentFailedError(
                f"environment {name!r} failed in {failed} of the first {ended} episodes, more than "
                f"max_error_rate = {limit:g} of the {among} to come allows; mend it, or raise "
                f"environments.{name}.max_error_rate. The last one: {failure}"
            )
