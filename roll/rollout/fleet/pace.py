"""`Pace`: how much of its time a replica's work would have taken a usual replica. Pure arithmetic.

Two kinds of work count: writing tokens, and prefill (reading prompts, and after new weights the
contexts of all running requests again, while nothing is written). Each is measured by its median
over the fleet. Writing is slow only if it is slow for each sequence and as a whole: the more
sequences share a replica, the slower each of them may grow.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Self

ENOUGH_OTHERS = 2
"""Replicas that one is compared with, at least; with fewer nobody knows who is the slow one."""
MIN_TOKENS = 10
"""Tokens that a usual replica would have written in a time from which anything is concluded."""
MOSTLY = 0.5
"""Share of its time from which on a replica mostly wrote, or mostly read."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a replica did, and how long it had for it; sums since its engine started, or the
    difference of two such sums."""

    written_tokens: int = 0
    prefilled_tokens: int = 0
    busy_s: float = 0.0
    """Seconds in which it had requests, and did not load weights."""
    sequence_s: float = 0.0
    """Sequences times seconds."""

    def __sub__(self, other: Self) -> Work:
        return Work(
            self.written_tokens - other.written_tokens,
            self.prefilled_tokens - other.prefilled_tokens,
            self.busy_s - other.busy_s,
            self.sequence_s - other.sequence_s,
        )


@dataclass(frozen=True, slots=True)
class Usual:
    """Medians over the fleet, in tokens per second; 0 where nothing is known."""

    each: float = 0.0
    """Written for each sequence."""
    whole: float = 0.0
    """Written by a replica."""
    prefill: float = 0.0
    """Read by a replica that mostly reads."""

    @property
    def known(self) -> bool:
        return self.each > 0

    def allows(self, work: Work) -> bool:
        """Whether it had time enough to conclude anything from it."""
        return work.busy_s > 0 and (not self.known or self.each * work.sequence_s >= MIN_TOKENS)

    def writing_share(self, work: Work) -> float:
        """Of the time of `work`, what a usual replica would have needed to write as much."""
        return max(
            work.written_tokens / (self.each * work.sequence_s),
            work.written_tokens / (self.whole * work.busy_s),
        )

    def share(self, work: Work) -> float:
        """Of the time of `work`, what a usual replica would have needed for all of it.

        No model reads more slowly than it writes, so that is assumed where nothing is known.
        """
        reading_share = work.prefilled_tokens / (max(self.prefill, self.whole) * work.busy_s)
        return self.writing_share(work) + reading_share


@dataclass
class Pace:
    """What the replicas of a fleet did lately, each by its index."""

    _each: dict[int, float] = field(default_factory=dict, init=False)
    _whole: dict[int, float] = field(default_factory=dict, init=False)
    _prefill: dict[int, float] = field(default_factory=dict, init=False)
    _usual: Usual = field(default=Usual(), init=False)
    _usual_until_s: float = field(default=0.0, init=False)

    def usual(self, now_s: float, keep_s: float) -> Usual:
        """The medians, worked out once in `keep_s`: a thousand replicas must not sort a thousand
        rates each."""
        if now_s >= self._usual_until_s:
            self._usual = Usual(_median(self._each), _median(self._whole), _median(self._prefill))
            self._usual_until_s = now_s + keep_s
        return self._usual

    def note(self, index: int, work: Work, usual: Usual) -> None:
        """Let later medians count what a replica did."""
        writing = usual.writing_share(work) if usual.known else 1.0
        if work.prefilled_tokens and writing < MOSTLY:
            self._prefill[index] = work.prefilled_tokens / (work.busy_s * (1 - writing))
        else:
            self._each[index] = work.written_tokens / work.sequence_s
            self._whole[index] = work.written_tokens / work.busy_s

    def forget(self, index: int) -> None:
        """Its engine is gone."""
        for rates in (self._each, self._whole, self._prefill):
            rates.pop(index, None)


def _median(rates: dict[int, float]) -> float:
    return statistics.median(rates.values()) if len(rates) > ENOUGH_OTHERS else 0.0
