"""Pictures of requests, fetched and checked before an engine reads them.

An engine that is given other patches than its model expects ends for all requests, or computes
something else without an error.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError, EngineError, WaitTimeoutError
from roll.core.pictures import Pictures
from roll.core.types import GenerateRequest
from roll.models.load import load_config
from roll.models.vision import folder
from roll.models.vision.folder import VisionPart
from roll.models.vision.parts import FAMILIES, sees

Patches = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Here:
    """Patches that are in this process."""

    patches: Patches

    def get(self) -> Patches:
        return self.patches


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a request."""

    place: int
    """Place of its first token in the prompt."""
    tokens: int
    """Number of its tokens."""
    grid: tuple[int, int, int]
    """Number of patches: frames, rows, columns."""
    patches: Patches
    """Uint8 `[P, C]`, not normalised; see `roll.core.pictures`."""


class PictureReader:
    """Fetches and checks pictures for an engine.

    Args:
        model: model of the engine.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model

    async def fetch(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the patches of its pictures in this process; the event loop goes
        on meanwhile. A request without pictures is returned as it is.

        Raises:
            EngineError: the model reads no pictures, they do not fit the model or the prompt, or
                the patches did not arrive in time.
            WorkerError: the patches are lost.
        """
        if request.pictures is None:
            return request
        try:
            pictures = await asyncio.to_thread(self._fetch, request.pictures)
        except WaitTimeoutError as error:
            raise EngineError(f"request {request.id!r} lacks its pictures: {error}") from error
        end = 0
        for picture in self.divide(pictures):
            begin, end = end, picture.place + picture.tokens
            here = set(request.prompt_tokens[picture.place : end])
            inside = begin <= picture.place and end <= len(request.prompt_tokens)
            if not inside or here != {self._part.placeholder}:
                raise EngineError(
                    f"request {request.id!r} should have a picture at tokens {picture.place} to "
                    f"{end - 1}, but these are {sorted(here)} of {len(request.prompt_tokens)} "
                    f"tokens; expected the placeholder {self._part.placeholder} once for each "
                    f"merged patch, after the picture before it, which ends at {begin}"
                )
        return replace(request, pictures=pictures)

    def divide(self, pictures: Pictures | None) -> list[Picture]:
        """Return the pictures of a fetched request, each with its own patches; none if it has none.

        Raises:
            EngineError: a picture is a video, or cannot be divided into tokens.
        """
        if pictures is None:
            return []
        merge, patches, begin = self._part.merge, pictures.patches.get(), 0
        found: list[Picture] = []
        for place, (frames, rows, columns) in zip(pictures.places, pictures.grids, strict=True):
            if frames != 1 or rows % merge or columns % merge:
                raise EngineError(
                    f"a picture has {frames} x {rows} x {columns} patches; expected one frame, and "
                    f"multiples of {merge} rows and columns. Give the frames of a video as "
                    "pictures"
                )
            end = begin + rows * columns
            tokens = rows * columns // merge**2
            found.append(Picture(place, tokens, (frames, rows, columns), patches[begin:end]))
            begin = end
        return found

    @cached_property
    def _part(self) -> VisionPart:
        """Vision part of the model, read when the first picture comes.

        Raises:
            EngineError: the model reads no pictures, or its folder has no image processor.
        """
        try:
            config = load_config(self._model)
            if sees(config):
                return folder.read(self._model, config)
        except ConfigError as error:
            raise EngineError(str(error)) from error
        raise EngineError(
            f"a request has pictures, but model {self._model.path!r} of type "
            f"{config.model_type!r} reads none; take one of {', '.join(sorted(FAMILIES))}"
        )

    def _fetch(self, pictures: Pictures) -> Pictures:
        """Fetch the patches; EngineError unless they are those that grids and model announce."""
        patches: Patches = pictures.patches.get()
        expected = (pictures.num_patches(), self._part.values)
        if patches.dtype != np.uint8 or patches.shape != expected:
            raise EngineError(
                f"patches are {patches.dtype} {list(patches.shape)}; expected uint8 "
                f"{list(expected)}, cut by the image processor of the engine's model, but not "
                "normalised"
            )
        return replace(pictures, patches=Here(patches))
