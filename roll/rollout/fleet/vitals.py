"""`Vitals`: progress of a replica's current engine as known from heartbeats, and its busy time."""

from __future__ import annotations

from dataclasses import dataclass

from roll.core.errors import RollError
from roll.core.types import Heartbeat
from roll.rollout.fleet.pace import Work

NO_HEARTBEAT = (
    "it gave no heartbeat for {:g} s (health.timeout_s; a machine with more work than cores needs "
    "a higher one)"
)
"""Reason of the loss of an engine that does not answer."""


DOUBLINGS = 3
"""Number of times that a new engine's limit doubles, so that a replica with many restarts behind it
does not wait for hours for one that hangs."""


def traced(error: Exception) -> Exception | None:
    """Return what a log shows the traceback of: nothing of errors whose text says it all, such as
    the end of Ray when the whole run ends."""
    return None if isinstance(error, RollError) else error


@dataclass(slots=True)
class Vitals:
    """Progress and busy time of one engine; all times are on one clock, in seconds."""

    restarts: int = 0
    """Number of engines that the replica has had before."""
    written_tokens: int = 0
    """Number of tokens written up to the last heartbeat."""
    prefilled_tokens: int = 0
    """Number of tokens read into the KV cache up to the last heartbeat."""
    last_heartbeat_s: float | None = None
    """Time of the last heartbeat; None before the first."""
    progress_s: float = 0.0
    """Time of the last known progress."""
    failing_since_s: float | None = None
    """Time of the first heartbeat in the current row of heartbeats with an unexpected error; None
    if the last heartbeat succeeded."""
    busy_s: float = 0.0
    """Total time in which the engine had at least one sequence to work on."""
    sequence_s: float = 0.0
    """Sum over all sequences of the time in which they ran."""
    sequences: int = 0
    """Number of sequences that the engine works on now; 0 while it must not work."""
    _since_s: float = 0.0
    """Time up to which `busy_s` and `sequence_s` are counted."""

    def note(self, beat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat that arrived at `now_s`; `progress_s` becomes `now_s` if a token
        count has changed."""
        before = self.written_tokens, self.prefilled_tokens
        self.written_tokens, self.prefilled_tokens = beat.written_tokens, beat.prefilled_tokens
        if before != (self.written_tokens, self.prefilled_tokens):
            self.progress_s = now_s
        self.last_heartbeat_s, self.failing_since_s = now_s, None

    def occupy(self, sequences: int, now_s: float) -> None:
        """Set the number of sequences from now on; add the time until now to the totals."""
        if self.sequences:
            passed_s = now_s - self._since_s
            self.busy_s += passed_s
            self.sequence_s += self.sequences * passed_s
        self.sequences, self._since_s = sequences, now_s

    def work(self, now_s: float) -> Work:
        """Return the work since the engine started, up to the last heartbeat, and the time until
        now."""
        self.occupy(self.sequences, now_s)
        return Work(self.written_tokens, self.prefilled_tokens, self.busy_s, self.sequence_s)

    def limit_s(self, timeout_s: float) -> float:
        """Return the time limit of the next heartbeat. Until its first one an engine gets twice the
        time of the engine before, at most eight times `timeout_s`: what made that one slow to
        answer, such as a busy machine, slows the new one down, too.

        Args:
            timeout_s: limit of an engine that has answered before.
        """
        return (
            timeout_s
            if self.last_heartbeat_s is not None
            else timeout_s * 2 ** min(self.restarts, DOUBLINGS)
        )

    def told(self, now_s: float) -> str:
        """Return a text for messages on the age and the token count of the last heartbeat."""
        if self.last_heartbeat_s is None:
            return "no heartbeat yet"
        ago_s = now_s - self.last_heartbeat_s
        return f"last heartbeat {ago_s:.1f} s ago, {self.written_tokens} tokens written by then"
