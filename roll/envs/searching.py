"""Searches of environments in the corpora of the run."""

from __future__ import annotations

from roll.core.threads.pauses import Pauses
from roll.envs.api import Search


def paused_search(search: Search | None, pauses: Pauses) -> Search | None:
    """Return a function that searches as one of these pauses; None if there is no search. The
    encoder of a corpus may be off its device for a whole training step."""
    if search is None:
        return None

    async def paused(corpus: str, text: str, count: int) -> list[str]:
        with pauses.wait():
            return await search(corpus, text, count)

    return paused
