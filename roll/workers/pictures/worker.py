"""`PictureWorker`: makes the patches of pictures, once for engines and trainers alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roll.config.sections.data import PicturesConfig
from roll.config.sections.model import ModelConfig
from roll.core.types import WorkerSpec
from roll.data.pictures.picture import Picture
from roll.data.pictures.placeholders import Grid, PictureProcessor
from roll.distributed.dispatch import dispatch
from roll.distributed.worker import Worker
from roll.models.image_processor import load_image_processor
from roll.workers.pictures.patches import PATCHES_APART, Patches, made


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
