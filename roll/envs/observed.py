"""`Observed`: what an environment answers, ready for the policy."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Observed:
    """Answer of an environment, ready for the policy."""

    tokens: array[int]
    """Tokens that follow those so far, up to the beginning of the policy's next turn, int32; empty
    if the episode is over."""
    text: str
    """Text of the messages, for people; of the first answer, the text of all its tokens."""
    prompt_end: str = ""
    """End of the text before the policy's next turn; some templates open a thought there."""
    reward: float = 0.0
    """Reward of the turn."""
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers of `info`."""
    state: str = ""
    """Name of the state that the next turn begins in; empty if the environment names none."""
    row: int = 0
    """Number of the row in which the next turn is written. The tokens continue it; or they begin
    it, if it is new."""
    follows: int | None = None
    """Of a row that is new: row before it of the same conversation; None if the conversation is
    new, too."""
    seat: int = 0
    """Player who has the next turn, if the policy plays several."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards that other players get for the turn, by player."""
    stop: tuple[str, ...] = ()
    """Strings that end the next turn, beside those of the run."""
    max_new_tokens: int | None = None
    """Largest number of tokens of the next turn, if that is less than the run's."""

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated
