"""`Vitals`: what is known of a replica's present engine: its heartbeats, and its time to work."""

from __future__ import annotations

from dataclasses import dataclass

from roll.core.types import Heartbeat
from roll.rollout.fleet.pace import Work


@dataclass(slots=True)
class Vitals:
    """All moments are those of one clock, in seconds."""

    written_tokens: int = 0
    """As of the last heartbeat."""
    prefilled_tokens: int = 0
    last_heartbeat_s: float | None = None
    progress_s: float = 0.0
    """When it last got on with anything, as far as is known."""
    failing_since_s: float | None = None
    """First of the heartbeats in a row that ended with an unexpected error."""
    busy_s: float = 0.0
    """In which it had at least one sequence to work on."""
    sequence_s: float = 0.0
    """Sequences times seconds."""
    sequences: int = 0
    """It works on now."""
    _since_s: float = 0.0

    def note(self, beat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat."""
        before = self.written_tokens, self.prefilled_tokens
        self.written_tokens, self.prefilled_tokens = beat.written_tokens, beat.prefilled_tokens
        if before != (self.written_tokens, self.prefilled_tokens):
            self.progress_s = now_s
        self.last_heartbeat_s, self.failing_since_s = now_s, None

    def occupy(self, sequences: int, now_s: float) -> None:
        """From now on it has so many sequences to work on; 0 while it must not work."""
        if self.sequences:
            passed_s = now_s - self._since_s
            self.busy_s += passed_s
            self.sequence_s += self.sequences * passed_s
        self.sequences, self._since_s = sequences, now_s

    def work(self, now_s: float) -> Work:
        """Since the engine started: done as of the last heartbeat, in the time until now."""
        self.occupy(self.sequences, now_s)
        return Work(self.written_tokens, self.prefilled_tokens, self.busy_s, self.sequence_s)

    def told(self, now_s: float) -> str:
        """When it was last heard of, for messages."""
        if self.last_heartbeat_s is None:
            return "no heartbeat yet"
        ago_s = now_s - self.last_heartbeat_s
        return f"last heartbeat {ago_s:.1f} s ago, {self.written_tokens} tokens written by then"
