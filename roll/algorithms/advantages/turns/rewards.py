"""Rewards of the turns of episodes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from roll.core.types import Turn


def rewards_of_turns(turns: Sequence[tuple[Turn, ...]], totals_B: Tensor) -> list[list[float]]:
    """Return the reward of each turn of each episode.

    What an episode has beyond the sum over its turns (the rewards of the run, shaping) belongs to
    its last turn.

    Args:
        turns: turns of each episode, with the rewards of the environment.
        totals_B: reward of each whole episode.
    """
    found = []
    for own, total in zip(turns, totals_B.tolist(), strict=True):
        given = [turn.reward for turn in own]
        if given:
            given[-1] += total - sum(given)
        found.append(given)
    return found
