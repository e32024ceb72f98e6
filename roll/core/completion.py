"""`Completion`: tokens that an engine has written, with the log-prob and weight version of each.

The columns are arrays of machine numbers, because a step has millions of tokens: a Python number
takes eight times the memory, and as much more time to send and to put into a batch. They are arrays
of the standard library, so that small processes need neither numpy nor torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, groupby, repeat
from typing import Any, Protocol, Self

from roll.core.pickling import pickle_by_fields

TOKEN_TYPE = "i"
"""Type code of arrays of token ids: int32."""
LOGPROB_TYPE = "f"
"""Type code of arrays of log-probs: float32."""


NOBODY = -1
"""Weight version of tokens that no weights wrote: what an environment said between two turns of the
policy. Their log-prob is 0, and they are never trained."""


class FinishReason(StrEnum):
    """The reason why an engine stopped generating tokens."""

    STOP = "stop"
    """The engine generated an end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """The completion reached the token limit; the sample is truncated."""
    ABORT = "abort"
    """The request was cancelled; the tokens generated until then are kept."""


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class VersionRuns:
    """Weight versions of consecutive tokens, as runs of equal versions.

    Example: VersionRuns(((3, 120), (4, 35))) says that version 3 wrote 120 tokens, and version 4
    the 35 tokens after them.
    """

    runs: tuple[tuple[int, int], ...] = ()
    """Pairs of a version, or `NOBODY`, and the number of tokens, which is positive; neighbours have
    different versions."""

    @classmethod
    def of_tokens(cls, versions: Iterable[int]) -> Self:
        """Return the runs of a list with one version per token."""
        return cls(tuple((version, sum(1 for _ in same)) for version, same in groupby(versions)))

    @classmethod
    def of_starts(cls, starts: Sequence[tuple[int, int]], end: int, begin: int = 0) -> Self:
        """Return the runs of the tokens with the numbers `begin` to `end` - 1.

        Args:
            starts: pairs of a version and the number of the first token written with it, in order.
            end: number of tokens, the first `begin` included.
            begin: number of leading tokens to leave out.
        """
        ends = [*(start for _, start in starts[1:]), end]
        return cls._of(
            (version, min(stop, end) - max(start, begin))
            for (version, start), stop in zip(starts, ends, strict=False)
        )

    @classmethod
    def _of(cls, runs: Iterable[tuple[int, int]]) -> Self:
        """Join neighbours with equal versions, leave out runs with 0 tokens or less, and return the
        rest."""
        joined: list[tuple[int, int]] = []
        for version, count in runs:
            if count > 0:
                if joined and joined[-1][0] == version:
                    count += joined.pop()[1]
                joined.append((version, count))
        return cls(tuple(joined))

    def __len__(self) -> int:
        """Return the number of tokens."""
        if len(self.runs) == 1:  # of nearly all completions
            return self.runs[0][1]
        return sum(count for _, count in self.runs)

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over the version of each token."""
        return chain.from_iterable(repeat(version, count) for version, count in self.runs)

    def __add__(self, later: VersionRuns) -> VersionRuns:
        if not self.runs or not later.runs:
            return later if later.runs else self
        (version, count), (next_version, next_count) = self.runs[-1], later.runs[0]
        if version != next_version:
            return VersionRuns(self.runs + later.runs)
        joined = (version, count + next_count)
        return VersionRuns((*self.runs[:-1], joined, *later.runs[1:]))

    def part(self, begin: int, end: int) -> VersionRuns:
        """Return the runs of the tokens with the numbers `begin` to `end` - 1."""
        start, found = 0, []
        for version, count in self.runs:
            found.append((version, min(start + count, end) - max(start, begin)))
            start += count
        return VersionRuns._of(found)

    @property
    def sampled(self) -> int:
        """Number of tokens that weights wrote."""
        if len(self.runs) == 1:  # of nearly all completions
            version, count = self.runs[0]
            return count if version != NOBODY else 0
        return sum(count for version, count in self.runs if version != NOBODY)

    @property
    def oldest(self) -> int | None:
        """Smallest version; None if no weights wrote any token."""
        return min((version for version, _ in self.runs if version != NOBODY), default=None)

    @property
    def newest(self) -> int | None:
        """Largest version; None if no weights wrote any token."""
        return max((version for version, _ in self.runs if version != NOBODY), default=None)


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Written:
    """Tokens of a completion. The columns have one entry per token."""

    tokens: array[int]
    """Token ids, int32."""
    logprobs: array[float]
    """Natural logarithm of each token's probability in the distribution that was sampled from,
    float32; empty if no engine wrote the tokens."""
    text: str | None = None
    """Text of all tokens, as rewards read it; None if it is not known. Of a part, and of parts that
    were joined, it is not: a character may lie across the boundary."""

    def get(self) -> Written:
        """Return these tokens themselves."""
        return self


class Content(Protocol):
    """Tokens of a completion, here or in another process."""

    def get(self) -> Written:
        """Return the tokens. If they are elsewhere, this waits until they are here.

        Raises:
            WorkerError: they are lost.
        """
        ...


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Completion:
    """A continuation of a prompt: what a scheduler needs of it, and its tokens or where they are.

    The driver should not read the tokens: there may be hundreds of millions of them in a step.
    """

    content: Content
    """The tokens, or their address."""
    versions: VersionRuns
    """Version of the weights that wrote each token."""
    finish: FinishReason
    """Reason of the end."""

    @classmethod
    def of(
        cls,
        tokens: Iterable[int],
        logprobs: Iterable[float],
        versions: Iterable[int] | VersionRuns,
        finish: FinishReason,
    ) -> Self:
        """Make a completion whose tokens are here.

        Args:
            tokens: token ids; an array of `TOKEN_TYPE` is kept, everything else is copied.
            logprobs: log-prob of each token; an array of `LOGPROB_TYPE` is kept.
            versions: runs of versions, or a version for each token.
            finish: reason of the end.

        Raises:
            ValueError: the numbers of entries differ.
        """
        if not isinstance(versions, VersionRuns):
            versions = VersionRuns.of_tokens(versions)
        written = Written(_array(TOKEN_TYPE, tokens), _array(LOGPROB_TYPE, logprobs))
        sizes = len(written.tokens), len(written.logprobs), len(versions)
        if len(set(sizes)) != 1:
            raise ValueError(
                "a completion has {} tokens, {} log-probs and {} versions; expected one of each "
                "per token".format(*sizes)
            )
        return cls(written, versions, finish)

    @property
    def tokens(self) -> array[int]:
        """Token ids, int32; see `Content.get`."""
        return self.content.get().tokens

    @property
    def logprobs(self) -> array[float]:
        """Natural logarithm of each token's probability in the distribution that was sampled from,
        float32; see `Content.get`."""
        return self.content.get().logprobs

    @property
    def text(self) -> str | None:
        """Text of all tokens; see `Written.text` and `Content.get`."""
        return self.content.get().text

    def with_text(self, text: str) -> Completion:
        """Return the completion with this text of all its tokens; waits for tokens that are
        elsewhere, see `Content.get`."""
        return replace(self, content=replace(self.content.get(), text=text))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.versions)

    def __add__(self, later: Completion) -> Completion:
        """Concatenate two parts; the finish reason is that of the second one."""
        first, second = self.content.get(), later.content.get()
        return Completion(
            Written(first.tokens + second.tokens, first.logprobs + second.logprobs),
            self.versions + later.versions,
            later.finish,
        )

    def part(self, begin: int, end: int | None = None) -> Completion:
        """Return the tokens with the numbers `begin` to `end` - 1, by default to the last one; the
        finish reason stays, and the text is not known."""
        stop = len(self) if end is None else end
        written = self.content.get()
        return Completion(
            Written(written.tokens[begin:stop], written.logprobs[begin:stop]),
            self.versions.part(begin, stop),
            self.finish,
        )


def _array(kind: str, values: Iterable[Any]) -> array[Any]:
    """Return the values as an array of this type; an array that is one already, as it is."""
    if isinstance(values, array) and values.typecode == kind:
        return values
    return array(kind, values)
