"""`Transcript`: the tokens of a row of an episode, turn by turn."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from roll.core.completion import (
    LOGPROB_TYPE,
    NOBODY,
    TOKEN_TYPE,
    Completion,
    FinishReason,
    VersionRuns,
    Written,
)
from roll.core.types import Prompt, Sample, Turn
from roll.envs.observed import Observed


@dataclass
class Transcript:
    """Tokens so far of a row: of a conversation, or of a part of it that has a context of its
    own."""

    opening: array[int]
    """Tokens before the first turn."""
    opening_text: str
    seat: int = 0
    """Player whose conversation it is."""
    follows: Transcript | None = None
    """Row before it of the same conversation; None for the first one."""
    tokens: array[int] = field(default_factory=lambda: array(TOKEN_TYPE))
    """Tokens after the opening, of the policy and of the environment."""
    logprobs: array[float] = field(default_factory=lambda: array(LOGPROB_TYPE))
    versions: VersionRuns = field(default_factory=VersionRuns)
    texts: list[str] = field(default_factory=list)
    """What policy and environment said, in turns, for people and rewards."""
    turns: list[Turn] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Number of each of these turns among all of the episode."""

    @property
    def length(self) -> int:
        """Number of tokens so far, the opening included."""
        return len(self.opening) + len(self.tokens)

    def context(self) -> array[int]:
        """Return all tokens so far, as a new array."""
        return self.opening + self.tokens

    @property
    def conversation(self) -> Transcript:
        """First row of its conversation."""
        return self if self.follows is None else self.follows.conversation

    def by_turns(self) -> list[Transcript]:
        """Return a row for each turn, which begins with all that was before the turn."""
        return [
            Transcript(
                self.opening + self.tokens[: turn.begin],
                "",
                self.seat,
                tokens=self.tokens[turn.begin : turn.end],
                logprobs=self.logprobs[turn.begin : turn.end],
                versions=self.versions.part(turn.begin, turn.end),
                turns=[replace(turn, begin=0, end=turn.end - turn.begin)],
                numbers=[number],
            )
            for turn, number in zip(self.turns, self.numbers, strict=True)
        ]

    def wrote(self, written: Written, versions: VersionRuns, state: str, number: int) -> None:
        """Add a turn of the policy.

        Args:
            written: tokens of the turn, with their text.
            versions: weight version of each token.
            state: name of the state in which the turn began.
            number: number of the turn in the episode.
        """
        begin = len(self.tokens)
        self.tokens += written.tokens
        self.logprobs += written.logprobs
        self.versions += versions
        self.texts.append(written.text or "")
        self.turns.append(Turn(begin, len(self.tokens), state=state))
        self.numbers.append(number)

    def paid(self, reward: float) -> None:
        """Set the reward of the latest turn of the policy, which must exist."""
        self.turns[-1] = replace(self.turns[-1], reward=reward)

    def paid_later(self, reward: float) -> None:
        """Add what a later turn of another player gives to the latest turn, which must exist."""
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)

    def heard(self, observed: Observed) -> None:
        """Add what the environment says before the next turn."""
        count = len(observed.tokens)
        self.tokens += observed.tokens
        self.logprobs += array(LOGPROB_TYPE, bytes(4 * count))
        if count:
            self.versions += VersionRuns(((NOBODY, count),))
        self.texts.append(observed.text)

    def sample(
        self, name: str, group: str, prompt: Prompt, *, text: str, truncated: bool
    ) -> Sample:
        """Return the row as a sample of `prompt`, the task, with `text` as that of the response."""
        opening = self.opening or array(TOKEN_TYPE, [0])  # a row needs at least one token
        own = replace(prompt, tokens=tuple(opening), text=self.opening_text)
        written = Written(self.tokens, self.logprobs, text)
        finish = FinishReason.LENGTH if truncated else FinishReason.STOP
        return Sample(name, group, own, Completion(written, self.versions, finish))
