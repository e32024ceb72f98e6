"""Samples of an episode that has ended: one, or one of each player whom the policy played."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def samples_of(config: EnvironmentConfig) -> int:
    """Return the number of samples that an episode gives."""
    return config.seats if config.trained_seats == "all" else 1


def samples_of_episode(
    played: Sequence[Transcript], end: End, name: str, task: GroupTask, seed: int
) -> list[ScoredSample]:
    """Return the samples of an episode, with the rewards of its environment.

    Args:
        played: conversations of the episode, in the order in which they began.
        end: how it ended.
        name: name of the episode.
        task: its task.
        seed: seed of the task; it chooses the player if only one is trained.
    """
    config = end.config
    if config.seats == 1:
        return [_scored(played, end, name, task)]
    by_seat = {one.seat: one for one in played}
    chosen = range(config.seats) if config.trained_seats == "all" else [seed % config.seats]
    found = []
    for seat in chosen:
        if seat in by_seat and by_seat[seat].turns:
            found.append(_scored([by_seat[seat]], end, f"{name}/{seat}", task, seat))
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
    """Return a sample with its rewards; the conversations behind the first are its branches."""
    config = end.config
    main, *branches = (
        each.sample(name, task.group_id, task.prompt, truncated=end.truncated) for each in played
    )
    turns: list[Turn] = [turn for each in played for turn in each.turns]
    reward = sum(turn.reward for turn in turns)
    apart = config.credit == "turns"
    parts = {"turns": float(len(turns)), "truncated": float(end.truncated), **end.info}
    if config.agent is not None:
        parts["conversations"] = float(len(played))
    return ScoredSample(
        main,
        0.0 if apart else reward,
        parts={f"{end.environment}/{key}": value for key, value in parts.items()},
        by_name={end.environment: reward},
        turns=tuple(played[0].turns),
        branches=tuple(branches),
        seat=seat,
        steps=StepRewards.of((t.end, t.reward) for t in played[0].turns) if apart else None,
    )


def _nothing(name: str, task: GroupTask, environment: str, seat: int = 0) -> ScoredSample:
    sample = Transcript(array(TOKEN_TYPE), "").sample(
        name, task.group_id, task.prompt, truncated=False
    )
    return ScoredSample(sample, 0.0, failed=(environment,), seat=seat)
