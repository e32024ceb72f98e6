"""Questions to judges, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Question:
    """One message to a judge."""

    text: str
    seed: int
    """Seed with which the judge samples."""
    schema: dict[str, Any] | None = None
    """JSON schema that the answer must fit; None if it is no JSON."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Text that a judge has written, and what it took."""

    text: str
    complete: bool = True
    """False if the answer was cut off at `max_new_tokens`."""
    input_tokens: int | None = None
    """Number of tokens that the judge read; None if it does not say."""
    output_tokens: int | None = None
    """Number of tokens that the judge wrote; None if it does not say."""
    latency_s: float = 0.0
    tries: int = 1
    cost: float | None = None
    """Price of the answer; None if prices or tokens are not known."""
    cached: bool = False


class Judge(Protocol):
    """A model that answers questions. All methods run on one event loop."""

    identity: dict[str, Any]
    """All settings that change answers, as JSON values; a part of the key in the cache."""

    async def open(self) -> None: ...

    async def ask(self, question: Question) -> Answer:
        """Answer a question.

        Raises:
            Exception: no answer came.
        """
        ...

    async def close(self) -> None: ...
