"""`PictureWorker`: makes the patches of pictures, once for engines and trainers alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll.config.sections.data import PicturesConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import PictureError
from roll.core.types import WorkerSpec
from roll.data.pictures.decoding import decoded
from roll.data.pictures.picture import Picture
from roll.data.pictures.placeholders import Grid, PictureProcessor
from roll.distributed.dispatch import BROADCAST, Apart, dispatch
from roll.distributed.worker import Worker
from roll.models.image_processor import load_image_processor


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


class PictureWorker(Worker):
    """A worker of `pictures`, on the machine of the driver, whose files it reads.

    Args:
        model: model whose image processor cuts the pictures.
        config: limits of their sizes.
    """

    def __init__(self, spec: WorkerSpec, model: ModelConfig, config: PicturesConfig) -> None:
        super().__init__(spec)
        self._settings = model, config
        self._processor: PictureProcessor | None = None

    async def start(self) -> None:
        """Load the image processor; ConfigError as in `load_image_processor`."""
        self._processor = await asyncio.to_thread(load_image_processor, *self._settings)

    @dispatch(PATCHES_APART)
    async def make(self, pictures: Sequence[Picture], grids: Sequence[Grid]) -> Patches:
        """Return the patches of the pictures of a row. The caller gets their address.

        Args:
            grids: number of patches that each picture must have.

        Raises:
            PictureError: a picture is damaged, or another one than the driver has looked at.
        """
        assert self._processor is not None, "call start first"
        return await asyncio.to_thread(made, self._processor, pictures, grids)


def made(
    processor: PictureProcessor, pictures: Sequence[Picture], grids: Sequence[Grid]
) -> Patches:
    """Return the patches of pictures; arguments and errors are those of `PictureWorker.make`."""
    parts = []
    for picture, (frames, rows, columns) in zip(pictures, grids, strict=True):
        try:
            part = processor.patches(decoded(picture.read()))
        except PictureError as error:
            raise PictureError(f"{picture.name}: {error}") from error
        wanted = frames * rows * columns
        if len(part) != wanted:
            raise PictureError(
                f"{picture.name}: has {len(part)} patches and not {wanted}; the file has changed"
            )
        parts.append(part)
    return Patches(np.concatenate(parts))
