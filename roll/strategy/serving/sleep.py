"""Memory that an engine gives back between rollouts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

ALL_TAGS = frozenset({"weights", "kv_cache"})
"""Names that vLLM and SGLang have for the two kinds of memory."""


@dataclass
class SleepState:
    """State of an engine that sleeps, and the steps to give memory back and to take it again."""

    platform: str
    """`cpu` or `cuda`; on `cpu` no memory is given back."""
    asleep: frozenset[str] = field(default=frozenset(), init=False)
    """Tags of the memory that is given back."""

    async def sleep(self, give_back: Callable[[Sequence[str]], Awaitable[object]]) -> bool:
        """Give back the memory that is not given back already; return True if there was any.

        Args:
            give_back: call of the engine that gives back the memory of some tags.
        """
        if self.platform != "cuda" or self.asleep == ALL_TAGS:
            return False
        await give_back(sorted(ALL_TAGS - self.asleep))
        self.asleep = ALL_TAGS
        return True

    async def wake(
        self, take: Callable[[Sequence[str]], Awaitable[object]], *, weights_only: bool
    ) -> None:
        """Take memory back.

        Args:
            take: call of the engine that takes back the memory of some tags.
            weights_only: leave the KV cache, which is most of the memory, given back.
        """
        tags = self.asleep & {"weights"} if weights_only else self.asleep
        if tags:
            await take(sorted(tags))
            self.asleep -= tags
