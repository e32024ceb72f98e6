"""`Progress`: counts the tokens that requests have written and that heartbeats have reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from roll.core.completion import Completion
from roll.core.errors import EngineError
from roll.core.types import Heartbeat, Piece

ReadFrom = Callable[[str, Sequence[int]], Sequence[Completion]]
"""Function of a request's id and a number of tokens per sibling.

It returns what each sibling has written after that many tokens."""


class Progress:
    """Token counts of one engine: every token is counted once, and reported at most once."""

    def __init__(self) -> None:
        self._written_tokens = 0
        self._reported: dict[str, list[int]] = {}
        """Id of a request under way -> number of reported tokens of each sibling."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reported

    def __len__(self) -> int:
        """Return the number of requests under way."""
        return len(self._reported)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reported)

    def begin(self, request_id: str, n: int) -> None:
        """Record that a request of `n` siblings has begun.

        Raises:
            EngineError: a request with this id is already under way.
        """
        if request_id in self._reported:
            raise EngineError(f"request {request_id!r} is under way already; give each its own id")
        self._reported[request_id] = [0] * n

    def end(self, request_id: str, completions: Sequence[Completion] = ()) -> None:
        """Record that a request has ended, with `completions`, or with none if it failed."""
        reported = self._reported.pop(request_id)
        written = sum(map(len, completions))
        self._written_tokens += max(0, written - sum(reported))

    def heartbeat(self, version: int, prefilled_tokens: int, read: ReadFrom) -> Heartbeat:
        """Report the tokens that requests have written since the last heartbeat.

        Args:
            version: version of the weights in use.
            prefilled_tokens: number of tokens that the engine has prefilled so far.
            read: reads the new tokens of a request.
        """
        progress = {}
        for request_id, reported in self._reported.items():
            pieces = []
            for index, written in enumerate(read(request_id, reported)):
                pieces.append(Piece(reported[index], written))
                reported[index] += len(written)
                self._written_tokens += len(written)
            progress[request_id] = tuple(pieces)
        return Heartbeat(version, self._written_tokens, prefilled_tokens, progress)
