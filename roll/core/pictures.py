"""Pictures of a row: where their tokens are, and where the patches that a model reads are."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from roll.core.completion import TOKEN_TYPE
from roll.core.pickling import pickle_by_fields


class Address(Protocol):
    """Patches of pictures, here or in another process."""

    def get(self) -> Any:
        """Return the patches of all pictures, one picture after the other: a numpy array, uint8
        `[P, C]`, as the image processor of the model cuts them, but not yet rescaled and
        normalised.

        C is channels x frames of a patch x height x width of a patch. If they are elsewhere, this
        waits until they are here, ten minutes at most.

        Raises:
            WaitTimeoutError: they did not arrive in time.
            WorkerError: they are lost.
        """
        ...


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures of a row, in the order of their tokens.

    A row has one token, the placeholder, for each merged patch of a picture. A model replaces
    their embeddings by what its vision tower makes of the patches. A placeholder that the policy
    itself writes stands for no picture, so the places are told, and never looked for.

    Example: Pictures(places=(3,), grids=((1, 4, 6),), patches=...) is a picture of 24 patches. If a
    model merges 2 x 2 of them, the tokens 3 to 8 of the row are its placeholders.
    """

    places: tuple[int, ...]
    """Place of the first placeholder of each picture among the tokens of the row."""
    grids: tuple[tuple[int, int, int], ...]
    """Number of patches of each picture: frames, rows, columns."""
    patches: Address
    """The patches of all pictures, or where they are; siblings share one address."""

    def num_patches(self) -> int:
        """Return the number of patches of all pictures."""
        return sum(frames * rows * columns for frames, rows, columns in self.grids)


def patches_of_rows(pictures: Sequence[Pictures | None] | None, rows: int) -> list[int]:
    """Return the number of patches of each row of a batch, which has `pictures` or None."""
    if pictures is None:
        return [0] * rows
    return [0 if each is None else each.num_patches() for each in pictures]


if TYPE_CHECKING:
    _Ints = array[int]
else:
    _Ints = array  # Python 3.11 has no array[int] at run time


class PromptTokens(_Ints):
    """Token ids of a prompt with pictures, int32, which pickle compresses: a large picture is one
    placeholder thousands of times, and the driver sends each prompt several times.

    Example: PromptTokens.of([5, 9, 9, 9, 9, 3])
    """

    @classmethod
    def of(cls, tokens: Iterable[int]) -> Self:
        return cls(TOKEN_TYPE, tokens)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unpacked, (zlib.compress(self.tobytes(), 1),)


def _unpacked(data: bytes) -> PromptTokens:
    """Return the tokens that `PromptTokens.__reduce_ex__` has compressed."""
    return PromptTokens(TOKEN_TYPE, zlib.decompress(data))
