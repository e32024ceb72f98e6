"""Placeholder tokens: a chat template writes one for each picture, a model reads one for each
merged patch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from roll.core.errors import PictureError, RowError
from roll.core.pictures import Pictures, PromptTokens
from roll.data.pictures.picture import EncodedPictures, Picture

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Grid = tuple[int, int, int]
"""Number of patches of a picture: frames, rows, columns."""


class PictureProcessor(Protocol):
    """Image processor of a model: how it cuts pictures into patches."""

    @property
    def token_id(self) -> int:
        """Id of the placeholder token."""
        ...

    def grid(self, height: int, width: int) -> Grid:
        """Return the number of patches of a picture with this height and width, in pixels;
        PictureError if the model takes no such picture."""
        ...

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of merged patches of a picture."""
        ...

    def patches(self, picture: Any) -> NDArray[np.uint8]:
        """Return the patches of a picture (of Pillow, in RGB), uint8 `[P, C]`, neither rescaled nor
        normalised; see `roll.core.pictures.Address`."""
        ...


@dataclass
class Placeholders:
    """Placeholders of a model; its image processor is loaded when the first picture comes."""

    load: Callable[[], PictureProcessor]

    @cached_property
    def processor(self) -> PictureProcessor:
        """Image processor of the model; errors are those of `load`."""
        return self.load()

    def grids(self, pictures: Sequence[Picture]) -> tuple[Grid, ...]:
        """Return the number of patches of each picture.

        Raises:
            PictureError: the model takes no picture of such a form.
            ConfigError: the model takes no pictures.
        """
        found = []
        for picture in pictures:
            try:
                found.append(self.processor.grid(picture.height, picture.width))
            except PictureError as error:
                raise PictureError(f"{picture.name}: {error}") from error
        return tuple(found)

    def expanded(
        self, tokens: Sequence[int], pictures: Sequence[Picture], place: str
    ) -> tuple[PromptTokens, Pictures]:
        """Return the tokens with one placeholder for each merged patch, and where they are.

        Args:
            tokens: tokens of a rendered row, with one placeholder for each picture.
            pictures: its pictures, in order; at least one.
            place: file and row, for the message.

        Raises:
            DataError: there are more or fewer placeholders than pictures.
            PictureError, ConfigError: see `grids`.
        """
        grids = self.grids(pictures)
        wanted = self.processor.token_id
        found = [i for i, token in enumerate(tokens) if token == wanted]
        if len(found) != len(pictures):
            raise RowError(
                f"{place}: the chat template writes {len(found)} placeholders (token {wanted}) for "
                f"{len(pictures)} pictures. A text of the row must not hold the placeholder's own "
                "text; or the template is not that of the model"
            )
        longer, places, done = PromptTokens.of(()), [], 0
        for at, grid in zip(found, grids, strict=True):
            longer.extend(PromptTokens.of(tokens[done:at]))
            places.append(len(longer))
            longer.extend(PromptTokens.of([wanted]) * self.processor.num_tokens(grid))
            done = at + 1
        longer.extend(PromptTokens.of(tokens[done:]))
        return longer, Pictures(tuple(places), grids, EncodedPictures(tuple(pictures)))


def expanded(
    tokens: Sequence[int],
    pictures: Sequence[Picture],
    placeholders: Placeholders | None,
    place: str,
) -> tuple[Sequence[int], Pictures | None]:
    """Return the tokens of a row, which may have no pictures; see `Placeholders.expanded`.

    Raises:
        DataError: as there; or there are pictures, but no placeholders.
        PictureError, ConfigError: as there.
    """
    if not pictures:
        return tokens, None
    if placeholders is None:
        raise RowError(f"{place}: has pictures, and nothing here takes any")
    return placeholders.expanded(tokens, pictures, place)
