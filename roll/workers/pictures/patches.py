"""`Patches` of the pictures of a row: how they are made, and how their address travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.core.errors import PictureError
from roll.data.pictures.decoding import decoded
from roll.data.pictures.picture import Picture
from roll.data.pictures.placeholders import Grid, PictureProcessor
from roll.distributed.dispatch import BROADCAST, Apart


@dataclass(frozen=True, slots=True)
class Patches:
    """Patches that are here: an address that needs no way."""

    values: NDArray[np.uint8]
    """Patches of all pictures of a row, one picture after the other, uint8 `[P, C]`."""

    def get(self) -> NDArray[np.uint8]:
        return self.values


def _divide(made: Patches) -> tuple[None, list[Any]]:
    return None, [made.values]


def _join(nothing: None, address: Callable[[int], Any]) -> Any:
    return address(0)


PATCHES_APART = replace(BROADCAST, apart=Apart(_divide, _join, inline=False))
"""Rule for methods that return patches: these stay in the object store, as values of the driver.
They outlive their worker, and end when no address of them is left."""


def made(
    processor: PictureProcessor, pictures: Sequence[Picture], grids: Sequence[Grid]
) -> Patches:
    """Return the patches of pictures; arguments and errors are those of `PictureWorker.make`."""
    parts = []
    for picture, (frames, rows, columns) in zip(pictures, grids, strict=True):
        try:
            part = processor.patches(decoded(picture.read()))
        except (PictureError, ValueError, MemoryError) as error:
            reason = str(error) or type(error).__name__
            raise PictureError(f"{picture.name}: {reason}") from error
        wanted = frames * rows * columns
        if len(part) != wanted:
            raise PictureError(
                f"{picture.name}: has {len(part)} patches and not {wanted}; the file has changed"
            )
        parts.append(part)
    return Patches(np.concatenate(parts))
