"""Samples of an episode that has ended: one, or one of each player whom the policy played."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from roll.config.sections.environment import EnvironmentConfig
from roll.core.completion import TOKEN_TYPE
from roll.core.step_rewards import StepRewards
from roll.core.types import Turn
from roll.rollout.episodes.transcript import Transcript
from roll.rollout.types import GroupTask, ScoredSample


@dataclass(frozen=True, slots=True)
class End:
    """End of an episode."""

    environment: str
    """Name of the environment in the config."""
    config: EnvironmentConfig
    info: Mapping[str, float]
    """Numbers of the last `info`."""
    truncated: bool
    """Whether a limit ended the episode."""
    restarts: int = 0
    """Number of earlier tries of the episode, whose environments failed."""
    shared_turns: int = 0
    """Number of turns that were written in another episode, off which it branches."""
    shared_tokens: int = 0
    """Number of tokens of the policy in these turns."""


def samples_of(config: EnvironmentConfig) -> int:
    """Return the number of samples that an episode gives."""
    return config.seats if config.trained_seats == "all" else 1


def trained_seats(config: EnvironmentConfig, seed: int) -> list[int]:
    """Return the players that are trained in an episode of this seed."""
    return list(range(config.seats)) if config.trained_seats == "all" else [seed % config.seats]


def samples_of_episode(
    played: Sequence[Transcript], end: End, name: str, task: GroupTask, seed: int
) -> list[ScoredSample]:
    """Return the samples of an episode, with the rewards of its environment.

    Args:
        played: rows of the episode, in the order in which they began.
        end: how it ended.
        name: name of the episode.
        task: its task.
        seed: seed of the task; it chooses the player if only one is trained.
    """
    config = end.config
    if config.seats == 1:
        return [_scored(played, end, name, task)]
    found = []
    for seat in trained_seats(config, seed):
        own = [one for one in played if one.seat == seat and one.turns]
        if own:
            found.append(_scored(own, end, f"{name}/{seat}", task, seat))
        else:  # the game was over before
            found.append(_nothing(f"{name}/{seat}", task, end.environment, seat))
    return found


def without_reward(
    name: str, task: GroupTask, environment: str, config: EnvironmentConfig
) -> list[ScoredSample]:
    """Return the samples of an episode that failed: they are counted, and not trained on."""
    if samples_of(config) == 1:
        return [_nothing(name, task, environment)]
    return [_nothing(f"{name}/{seat}", task, environment, seat) for seat in range(config.seats)]


def _scored(
    played: Sequence[Transcript], end: End, name: str, task: GroupTask, seat: int = 0
) -> ScoredSample:
    """Return a sample with its rewards; the rows behind the first are its branches.

    The text of the sample is that of its whole first conversation, also if this has several rows.
    """
    config = end.config
    rows = list(played)
    if config.rows == "turns":
        rows = [row for each in played for row in each.by_turns()] or rows
        rows.sort(key=lambda row: row.numbers)
        rows[0].opening_text = played[0].opening_text
    said = [text for one in played if one.conversation is played[0] for text in one.texts]
    main, *branches = (
        row.sample(
            name,
            task.group_id,
            task.prompt,
            text="" if number else "\n".join(filter(None, said)),
            truncated=end.truncated,
        )
        for number, row in enumerate(rows)
    )
    turns = _turns(rows)
    reward = sum(turn.reward for turn in turns)
    apart = config.credit == "turns"
    parts = {"turns": float(len(turns)), "truncated": float(end.truncated)}
    parts |= {"restarts": float(end.restarts), **end.info}
    if config.branching is not None:
        parts["shared_turns"] = float(end.shared_turns)
    if config.agent is not None:
        parts["conversations"] = float(sum(one.follows is None for one in played))
    if config.rows == "turns" or config.history != "keep":
        parts["rows"] = float(len(rows))
    return ScoredSample(
        main,
        0.0 if apart else reward,
        parts={f"{end.environment}/{key}": value for key, value in parts.items()},
        by_name={end.environment: reward},
        turns=turns,
        branches=tuple(branches),
        seat=seat,
        shared_tokens=end.shared_tokens,
        steps=_steps(rows, turns) if apart else None,
        turn_reward=reward if apart else 0.0,
    )


def _turns(rows: Sequence[Transcript]) -> tuple[Turn, ...]:
    """Return the turns of all rows, in the order in which they were written."""
    found = [
        (number, replace(turn, row=place))
        for place, row in enumerate(rows)
        for turn, number in zip(row.turns, row.numbers, strict=True)
    ]
    return tuple(turn for _, turn in sorted(found, key=lambda each: each[0]))


def _steps(rows: Sequence[Transcript], turns: Sequence[Turn]) -> StepRewards:
    """Return the rewards of turns, each at the last token of its turn."""
    starts = list(accumulate((len(row.tokens) for row in rows), initial=0))
    return StepRewards.of((starts[turn.row] + turn.end, turn.reward) for turn in turns)


def _nothing(name: str, task: GroupTask, environment: str, seat: int = 0) -> ScoredSample:
    sample = Transcript(array(TOKEN_TYPE), "").sample(
        name, task.group_id, task.prompt, text="", truncated=False
    )
    return ScoredSample(sample, 0.0, failed=(environment,), seat=seat)
