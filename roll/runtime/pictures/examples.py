"""`ExamplePictures`: patches of the pictures of rows that the offline pipelines train on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Self

from roll.config.offline_base import OfflineConfig
from roll.core.errors import PictureError
from roll.core.metrics import Metrics
from roll.core.pictures import Address, Pictures
from roll.core.threads.loop_thread import LoopThread
from roll.data.chat.tokenization import TokenSequence
from roll.data.examples import Example
from roll.distributed.cluster import Launcher
from roll.runtime.pictures.maker import PictureMaker, start_pictures
from roll.runtime.run_data import RunData


@dataclass
class ExamplePictures:
    """Patches of examples, as the main thread asks for them."""

    maker: PictureMaker | None
    """Maker of the patches; None if no row has pictures."""
    loop: LoopThread
    _begun: dict[str, Future[Example]] = field(default_factory=dict, init=False)
    """Id of an example -> the example with its patches, which are being made."""

    @classmethod
    def start(
        cls,
        config: OfflineConfig,
        data: RunData[Example],
        launcher: Launcher,
        loop: LoopThread,
    ) -> Self:
        """Start the workers that make the patches, if there are rows with pictures."""
        rows = (
            sequence.pictures
            for example in chain(data.train.in_memory, data.held_out.in_memory)
            for sequence in example.sequences
        )
        maker = start_pictures(rows, config.data.pictures, config.train_model, launcher)
        return cls(maker, loop)

    def begin(self, examples: Sequence[Example]) -> None:
        """Begin to make the patches of examples that will be asked for soon. What was begun before
        for others is given up."""
        if self.maker is None:
            return
        self._begun = self._making(examples, counted=True)

    def made(self, examples: Sequence[Example], *, counted: bool = True) -> list[Example | None]:
        """Return the examples with the addresses of their patches, in order; None in place of one
        with a broken picture, which is named in the log.

        Args:
            counted: whether they count in the metrics; those that were begun before always do.

        Raises:
            RollError: a worker that died could not be replaced.
        """
        if self.maker is None:
            return list(examples)
        making = self._making(examples, counted=counted)

        async def all_of_them() -> list[Example | BaseException]:
            futures = map(asyncio.wrap_future, making.values())
            return await asyncio.gather(*futures, return_exceptions=True)

        found = dict(zip(making, self.loop.run(all_of_them()), strict=True))
        for one in found.values():
            if isinstance(one, BaseException) and not isinstance(one, PictureError):
                raise one
        made = (found[example.id] for example in examples)
        return [one if isinstance(one, Example) else None for one in made]

    def _making(self, examples: Sequence[Example], *, counted: bool) -> dict[str, Future[Example]]:
        """Return id -> example with its patches, which are being made; those that were begun are
        taken over."""
        assert self.maker is not None
        making: dict[str, Future[Example]] = {}
        for example in examples:
            if example.id in self._begun:
                making[example.id] = self._begun.pop(example.id)
            elif example.id not in making:
                making[example.id] = self.loop.submit(_made(self.maker, example, counted=counted))
        return making

    def take_metrics(self) -> Metrics:
        """Return the metrics of the patches since the last call; none without pictures."""
        return Metrics() if self.maker is None else self.maker.take_metrics()


async def _made(maker: PictureMaker, example: Example, *, counted: bool) -> Example:
    """Return an example with the addresses of its patches. Both sequences of a pair share those of
    the same pictures; it counts in the metrics if it is `counted`. Errors are those of
    `PictureMaker.made`."""
    known: dict[Address, Pictures] = {}
    sequences = list[TokenSequence]()
    for sequence in example.sequences:
        found = sequence.pictures
        if found is not None:
            if found.patches not in known:
                known[found.patches] = await maker.made(example.id, found, counted=counted)
            found = replace(found, patches=known[found.patches].patches)
        sequences.append(replace(sequence, pictures=found))
    return replace(example, sequences=tuple(sequences))
