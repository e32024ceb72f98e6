"""Pictures of requests on their way into an engine; what engines do with them is in
`tests/contract/test_vision_engines.py`."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from roll.config.sections.model import ModelConfig
from roll.core.errors import EngineError, WaitTimeoutError
from roll.core.pictures import Pictures
from roll.core.types import GenerateRequest, SamplingParams
from roll.strategy.serving.pictures import PictureReader


class Late:
    """Patches on a node that does not answer."""

    def get(self) -> NoReturn:
        raise WaitTimeoutError("waited 600 s for a value in the object store")


def test_patches_that_do_not_arrive_end_the_request_that_needs_them() -> None:
    pictures = Pictures(places=(1,), grids=((1, 2, 2),), patches=Late())
    request = GenerateRequest("3/a", [1, 2, 3], SamplingParams(1.0, 4), pictures=pictures)
    reader = PictureReader(ModelConfig(path="not-read"))
    with pytest.raises(EngineError, match="request '3/a' lacks its pictures: waited 600 s"):
        asyncio.run(reader.fetch(request))
