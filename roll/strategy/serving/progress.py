"""`Progress`: how much of what running requests have written a heartbeat has reported already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from roll.core.errors import EngineError
from roll.core.types import Completion, Heartbeat, Piece

ReadFrom = Callable[[str, Sequence[int]], Sequence[Completion]]
"""Of a request and, per sibling, a number of tokens: what each sibling wrote after so many."""


class Progress:
    """The books of one engine: every token is counted once, and reported at most once."""

    def __init__(self) -> None:
        self._written_tokens = 0
        self._reported: dict[str, list[int]] = {}
        """Of each request under way, tokens per sibling."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reported

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._reported)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reported)

    def begin(self, request_id: str, n: int) -> None:
        """A request of `n` siblings.

        Raises:
            EngineError: one of this id is under way.
        """
        if request_id in self._reported:
            raise EngineError(f"request {request_id!r} is under way already; give each its own id")
        self._reported[request_id] = [0] * n

    def end(self, request_id: str, completions: Sequence[Completion] = ()) -> None:
        """The request is over, with `completions`; with none if it failed."""
        reported = self._reported.pop(request_id)
        written = sum(len(completion.tokens) for completion in completions)
        self._written_tokens += max(0, written - sum(reported))

    def heartbeat(self, version: int, prefilled_tokens: int, read: ReadFrom) -> Heartbeat:
        """What `read` finds beyond the last heartbeat, which is this one from now on."""
        progress = {}
        for request_id, reported in self._reported.items():
            pieces = []
            for index, written in enumerate(read(request_id, reported)):
                pieces.append(Piece(reported[index], written))
                reported[index] += len(written.tokens)
                self._written_tokens += len(written.tokens)
            progress[request_id] = tuple(pieces)
        return Heartbeat(version, self._written_tokens, prefilled_tokens, progress)
