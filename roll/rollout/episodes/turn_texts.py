"""Episodes turn by turn, as people read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roll.rollout.types import ScoredSample


def turn_texts(scored: ScoredSample, read: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """Return an episode turn by turn: what the policy wrote, with the reward of the turn, and what
    stands before it since the turn before. That is the whole context if a turn has another one.

    Args:
        scored: the episode.
        read: function that decodes token ids to text.
    """
    said: list[dict[str, Any]] = []
    before = list(scored.sample.prompt.tokens)
    for turn in scored.turns:
        row = scored.rows[turn.row]
        tokens = row.completion.tokens
        context = [*row.prompt.tokens, *tokens[: turn.begin]]
        known = context[: len(before)] == before
        heard = context[len(before) :] if known else context
        if heard:
            said.append({"by": "environment", "text": read(heard)})
        written = tokens[turn.begin : turn.end]
        said.append({"by": "policy", "text": read(written), "reward": turn.reward})
        before = [*context, *written]
    return said
