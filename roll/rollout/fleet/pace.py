"""`FleetSpeeds`: a replica's speed compared with the usual one of the fleet, as pure arithmetic.

The result is a share: the time in which a usual replica would have done the same work, divided by
the time that the replica had. Two kinds of work count: writing tokens, and prefill. Prefill reads
prompts; after new weights it reads the contexts of all running requests again, and no token is
written meanwhile. The usual speed of each kind is its median over the fleet. Writing counts as slow
only if it is slow per sequence and also as a whole, because each sequence becomes slower when more
sequences share a replica.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Self

ENOUGH_OTHERS = 2
"""Number of other replicas that a comparison needs; with fewer it is unclear which one is slow."""
MIN_TOKENS = 10
"""Smallest amount of work in a measurement: tokens that a usual replica would write in its time."""
MOSTLY = 0.5
"""Writing share (`Usual.writing_share`) below which a replica mostly read in a measurement; from
this share on it mostly wrote."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a replica and the time that it had: totals since its engine started, or the
    difference of two totals."""

    written_tokens: int = 0
    prefilled_tokens: int = 0
    busy_s: float = 0.0
    """Time in which the replica had requests and did not load weights, in seconds."""
    sequence_s: float = 0.0
    """Sum over all sequences of the time in which they ran, in seconds."""

    def __sub__(self, other: Self) -> Work:
        return Work(
            self.written_tokens - other.written_tokens,
            self.prefilled_tokens - other.prefilled_tokens,
            self.busy_s - other.busy_s,
            self.sequence_s - other.sequence_s,
        )


@dataclass(frozen=True, slots=True)
class Usual:
    """Usual speeds: medians over the fleet, in tokens per second; 0 if too few are known."""

    each: float = 0.0
    """Tokens per second that a replica writes for each sequence."""
    whole: float = 0.0
    """Tokens per second that a replica writes for all its sequences."""
    prefill: float = 0.0
    """Tokens per second that a replica reads while it mostly reads."""

    @property
    def known(self) -> bool:
        """True if the speeds of writing are known, which all comparisons need."""
        return self.each > 0

    def allows(self, work: Work) -> bool:
        """Return whether `work` covers enough time to compare it with the usual speeds."""
        return work.busy_s > 0 and (not self.known or self.each * work.sequence_s >= MIN_TOKENS)

    def writing_share(self, work: Work) -> float:
        """Return the time in which a usual replica writes the tokens of `work`, as a share of the
        time of `work`. The speeds must be known, and the times of `work` above 0."""
        return max(
            work.written_tokens / (self.each * work.sequence_s),
            work.written_tokens / (self.whole * work.busy_s),
        )

    def share(self, work: Work) -> float:
        """Return the time in which a usual replica does all of `work`, as a share of its time.

        No model reads more slowly than it writes, so the speed of reading is assumed to be at least
        the speed of writing, also if it is unknown. The speed of writing must be known.
        """
        reading_share = work.prefilled_tokens / (max(self.prefill, self.whole) * work.busy_s)
        return self.writing_share(work) + reading_share


@dataclass
class FleetSpeeds:
    """Latest speeds of the replicas of a fleet, in tokens per second, by replica index."""

    _each: dict[int, float] = field(default_factory=dict, init=False)
    _whole: dict[int, float] = field(default_factory=dict, init=False)
    _prefill: dict[int, float] = field(default_factory=dict, init=False)
    _usual: Usual = field(default=Usual(), init=False)
    _usual_until_s: float = field(default=0.0, init=False)

    def usual(self, now_s: float, keep_s: float) -> Usual:
        """Return the medians over the fleet; they are computed at most once in `keep_s` seconds, so
        that a thousand replicas do not sort a thousand speeds each.

        Args:
            now_s: present time, on any clock that all calls share, in seconds.
        """
        if now_s >= self._usual_until_s:
            self._usual = Usual(_median(self._each), _median(self._whole), _median(self._prefill))
            self._usual_until_s = now_s + keep_s
        return self._usual

    def note(self, index: int, work: Work, usual: Usual) -> None:
        """Record the speed of a replica for later medians: of reading if it mostly read, else of
        writing.

        Args:
            index: index of the replica.
            work: its work in one measurement, whose times are above 0.
            usual: present usual speeds.
        """
        writing = usual.writing_share(work) if usual.known else 1.0
        if work.prefilled_tokens and writing < MOSTLY:
            self._prefill[index] = work.prefilled_tokens / (work.busy_s * (1 - writing))
        else:
            self._each[index] = work.written_tokens / work.sequence_s
            self._whole[index] = work.written_tokens / work.busy_s

    def forget(self, index: int) -> None:
        """Drop the speeds of a replica whose engine is gone."""
        for rates in (self._each, self._whole, self._prefill):
            rates.pop(index, None)


def _median(rates: dict[int, float]) -> float:
    """Return the median of the rates; 0 if fewer than `ENOUGH_OTHERS` + 1 replicas have one."""
    return statistics.median(rates.values()) if len(rates) > ENOUGH_OTHERS else 0.0
