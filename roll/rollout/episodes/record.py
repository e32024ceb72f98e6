"""`Record`: turns of an episode and their answers, from which it can be replayed."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from roll.config.sections.environment import BranchingConfig
from roll.core.completion import Completion
from roll.core.errors import EnvironmentFailedError
from roll.envs.observed import Observed


@dataclass
class Record:
    """Turns of an episode so far. An episode that begins with some of them replays these: the
    environment hears them, and its answers must be those that it gave before."""

    session: str
    """Episode that wrote the first of them; its replica has their prefix."""
    first: Observed | None = None
    """Answer with which the episode began; None before it began."""
    turns: list[Completion] = field(default_factory=list)
    """Turns of the policy, with their tokens."""
    heard: list[Observed] = field(default_factory=list)
    """Answer to each of these turns; the last one may have none yet."""
    shared: int = 0
    """Number of turns, from the first on, that another episode wrote."""

    @property
    def shared_tokens(self) -> int:
        """Number of tokens of the policy that another episode wrote."""
        return sum(map(len, self.turns[: self.shared]))

    def before(self, number: int) -> Record:
        """Return the part before the turn with this number, for another episode."""
        return Record(
            self.session, self.first, self.turns[:number], self.heard[:number], shared=number
        )

    def forget_unanswered(self) -> None:
        """Forget the turn to which the environment has given no answer: it may be to blame."""
        del self.turns[len(self.heard) :]

    def begins(self, observed: Observed, environment: str) -> None:
        """Note how the episode begins; EnvironmentFailedError if it is replayed, and began in
        another way before."""
        if self.first is None:
            self.first = observed
        else:
            _require_same(self.first, observed, environment, "its first answer")

    def answered(self, number: int, observed: Observed, environment: str) -> None:
        """Note the answer to a turn; EnvironmentFailedError if the turn is replayed, and the answer
        was another one before."""
        if number == len(self.heard):
            self.heard.append(observed)
        else:
            what = f"its answer to turn {number + 1}"
            _require_same(self.heard[number], observed, environment, what)


def branch_points(
    records: Sequence[Record], config: BranchingConfig, count: int
) -> list[tuple[int, int]]:
    """Return where further episodes of a task leave those that were played: pairs of an episode and
    the number of the turn that is written anew; the most uncertain turns first.

    A turn is as uncertain as the policy was more uncertain in it than in the first turn of its
    episode (ARPO, arXiv 2507.19849). First turns are no branch points: they follow no
    answer of the environment.

    Args:
        records: episodes that were played from their beginning.
        config: rules of branching.
        count: largest number of episodes.
    """
    rises = [
        (entropy(turn, config.tokens) - entropy(record.turns[0], config.tokens), episode, number)
        for episode, record in enumerate(records)
        for number, turn in enumerate(record.turns)
        if number
    ]
    uncertain = [each for each in rises if each[0] > config.min_rise]
    chosen = sorted((-rise, episode, number) for rise, episode, number in uncertain)
    return [(episode, number) for _, episode, number in chosen for _ in range(config.width)][:count]


def entropy(turn: Completion, tokens: int) -> float:
    """Return an estimate of the policy's entropy in the first tokens of a turn, in nats per token:
    the mean of their negative log-probs. 0 for a turn without tokens."""
    logprobs = turn.logprobs[:tokens]
    return -math.fsum(logprobs) / len(logprobs) if logprobs else 0.0


def _require_same(before: Observed, now: Observed, environment: str, what: str) -> None:
    """Raise EnvironmentFailedError if an environment that is replayed answers another thing than
    before."""
    if _shape(before) != _shape(now):
        raise EnvironmentFailedError(
            f"environment {environment!r} cannot be replayed: {what} was {before.text!r:.60} with "
            f"reward {before.reward:g}, and is {now.text!r:.60} with reward {now.reward:g}; let it "
            "depend on its seed and the turns alone, or drop `replay`"
        )


def _shape(observed: Observed) -> tuple[array[int], float, bool, bool, int, int, str]:
    """Return what must be equal in an answer that is given again; its `info` may tell times."""
    return (
        observed.tokens,
        observed.reward,
        observed.terminated,
        observed.truncated,
        observed.row,
        observed.seat,
        observed.state,
    )
