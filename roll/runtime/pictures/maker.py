"""`PictureMaker`: has workers make the patches of pictures; the driver gets their addresses."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from roll.config.sections.data import PicturesConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.errors import PictureError, WaitTimeoutError, WorkerLostError
from roll.core.metrics import Metrics, Sum
from roll.core.pictures import Address, Pictures
from roll.core.types import Prompt
from roll.data.pictures.picture import EncodedPictures
from roll.data.pictures.placeholders import Grid
from roll.distributed.cluster import Cluster, Launcher, Placement
from roll.workers.pictures.worker import PictureWorker

logger = logging.getLogger(__name__)

TRIES = 3
"""Number of workers that the pictures of a row may kill before the row is left out. Each worker has
one row at a time, so no other row is to blame. But a death without work may show only at the next
row, and two workers may have died so."""


@dataclass(eq=False)
class PictureMaker:
    """Maker of patches, by a cluster of workers that are replaced when they die. All calls come
    from one event loop."""

    cluster: Cluster[PictureWorker]
    timeout_s: float
    """Time limit for the pictures of one row, in seconds."""
    _free: asyncio.Queue[int] = field(default_factory=asyncio.Queue, init=False)
    """Ranks of the workers without work."""
    _restarts: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)
    """Rank of a lost worker -> start of another one, until a row has waited for its end."""
    _broken: dict[tuple[str, EncodedPictures], str] = field(default_factory=dict, init=False)
    """Name and pictures of each row that cannot be made into patches -> why."""
    _counts: Counter[str] = field(default_factory=Counter, init=False)
    """Numbers of rows, under the names of the metrics."""
    _reported: Counter[str] = field(default_factory=Counter, init=False)
    """Part of `_counts` that `take_metrics` has returned."""

    def __post_init__(self) -> None:
        for rank in range(self.cluster.world_size):
            self._free.put_nowait(rank)

    async def prompt(self, prompt: Prompt, *, counted: bool = True) -> Prompt:
        """Return a prompt with the address of its patches; one without pictures, or that has its
        patches, as it is. It counts in the metrics if it is `counted`.

        Raises:
            PictureError: a picture cannot be made into patches, in time, or without the death of
                workers.
            RollError: a worker that died could not be replaced.
        """
        if prompt.pictures is None:
            return prompt
        made = await self.made(prompt.id, prompt.pictures, counted=counted)
        return replace(prompt, pictures=made)

    async def prompts(self, prompts: Iterable[Prompt]) -> dict[str, Prompt]:
        """Return id -> prompt with the address of its patches, which the metrics do not count; the
        errors are those of `prompt`."""
        distinct = {prompt.id: prompt for prompt in prompts}
        made = await asyncio.gather(*(self.prompt(p, counted=False) for p in distinct.values()))
        return dict(zip(distinct, made, strict=True))

    async def made(self, name: str, pictures: Pictures, *, counted: bool = True) -> Pictures:
        """Return the pictures of a row with the address of their patches, which ends with its last
        copy; the errors are those of `prompt`.

        Args:
            name: name of the row, for messages.
            pictures: its pictures, whose patches may be made already.
            counted: whether it counts in the metrics.
        """
        encoded = pictures.patches
        if not isinstance(encoded, EncodedPictures):
            return pictures
        try:
            if (name, encoded) in self._broken:
                raise PictureError(self._broken[name, encoded])
            patches = await self._ask(name, encoded, pictures.grids)
        except PictureError:
            self._counts["pictures/broken_rows"] += counted
            raise
        self._counts["pictures/rows"] += counted
        return replace(pictures, patches=patches)

    def take_metrics(self) -> Metrics:
        """Return the number of rows whose patches were made, and of those left out because their
        pictures are broken, since the last call."""
        names = ("pictures/rows", "pictures/broken_rows")
        new = {name: self._counts[name] - self._reported[name] for name in names}
        self._reported.update(new)  # the counts are those of another thread
        return Metrics({name: Sum(count) for name, count in new.items()})

    async def _ask(self, name: str, encoded: EncodedPictures, grids: Sequence[Grid]) -> Address:
        """Return the address of patches. A row whose pictures are broken is named in the log, once;
        the errors are those of `prompt`."""
        try:
            return await self._tried(encoded, grids)
        except PictureError as error:
            told = self._broken[name, encoded] = f"{name} is left out: {error}"
            logger.warning("%s", told)
            raise PictureError(told) from error

    async def _tried(self, encoded: EncodedPictures, grids: Sequence[Grid]) -> Address:
        """Return the address of patches, made by the first worker that does not die of them; the
        errors are those of `prompt`."""
        for _ in range(TRIES):
            rank = await self._free.get()
            try:
                await self._revive(rank)
                return await self._answer(rank, encoded, grids)
            except WorkerLostError as error:
                # As a text: whoever keeps the record would keep all that the error's frames hold.
                logger.warning("%s; another one is started", str(error))
            finally:
                self._free.put_nowait(rank)
        raise PictureError(f"{encoded.pictures[0].name}: killed {TRIES} workers")

    async def _answer(self, rank: int, encoded: EncodedPictures, grids: Sequence[Grid]) -> Address:
        """Return the address of patches that a worker makes. One that takes too long is ended.

        Raises:
            PictureError: a picture is broken, or the worker took too long.
            WorkerLostError: the worker died.
        """
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                return await self.cluster.ask(rank, PictureWorker.make, encoded.pictures, grids)
        except TimeoutError:
            if not limit.expired():
                raise
        await asyncio.to_thread(self.cluster.end, rank)
        name = encoded.pictures[0].name
        raise PictureError(f"{name}: took longer than {self.timeout_s:g} s")

    async def _revive(self, rank: int) -> None:
        """Wait until a worker is there, if need be another one in place of a lost one, which may
        have died without work, so that no row is to blame. A start goes on if its row is cancelled.

        Raises:
            RollError: the new worker does not start, or not in time.
        """
        if rank in self.cluster.lost and rank not in self._restarts:
            self._restarts[rank] = asyncio.create_task(self._restart(rank))
        if rank in self._restarts:
            await asyncio.wait([self._restarts[rank]])
            self._restarts.pop(rank).result()

    async def _restart(self, rank: int) -> None:
        """Start another worker in place of one that is lost; the errors are those of `_revive`."""
        await asyncio.to_thread(self.cluster.restart, rank)
        limit = asyncio.timeout(self.cluster.call_timeout_s)
        try:
            async with limit:
                await self.cluster.ask(rank, PictureWorker.start)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise WaitTimeoutError(
                f"waited {self.cluster.call_timeout_s:g} s for a worker of pictures to start"
            ) from error


def start_pictures(
    rows: Iterable[Pictures | None],
    config: PicturesConfig,
    model: ModelConfig,
    launcher: Launcher,
) -> PictureMaker | None:
    """Start the workers that make the patches of a run; None if no row has pictures.

    Args:
        rows: pictures of all rows of the run.
        model: model that reads the patches.
    """
    if not any(rows):
        return None
    place = Placement(Role.PICTURES, pool=None, workers=config.workers, replaceable=True)
    cluster = launcher.start(PictureWorker, place, model, config)
    cluster.call(PictureWorker.start)
    return PictureMaker(cluster, config.timeout_s)
