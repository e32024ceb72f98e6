"""`BundleHost`: the worker's side of calls that travel in bundles; see `bundles.py`."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray import cloudpickle

from roll.core.errors import RollError
from roll.core.pickling import pickle_by_fields
from roll.distributed.dispatch import Apart
from roll.distributed.remote_values import Packed

WINDOW_S = 0.001
"""Time that the first answer of a bundle waits for others, in seconds."""
INLINE_BYTES = 100 * 1024
"""Size below which Ray sends a result to the caller in any case, in bytes, and would ask the caller
for it later. Parts that must stay in the object store are filled up to it."""
SMALL_BYTES = 256
"""Mean size up to which parts that should stay in the object store are sent with the answers, in
bytes, if the bundle has less than INLINE_BYTES of them. The caller sends them on to several
workers, each time about as many bytes as an address has."""
KEPT_S = 10.0
"""Time for which answers that were sent are kept, in seconds, unless the next ones are asked for
earlier: a caller that did not get them says so at once."""
STORED_BYTES = 32 << 20
"""Size from which a bundle takes no further answers, in bytes of the parts that stay in the object
store. They are freed together, so it is not larger; and each bundle costs the driver some calls of
Ray, so it is not smaller: this is eight groups of 16 long samples (benchmarks/data_path.py)."""


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class SentCall:
    """A call on its way to the worker."""

    number: int
    """Number of the call among those of its caller."""
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a call, in a form that can be sent whatever its class is."""

    kind: str
    """Name of its class."""
    message: str
    trace: str
    error: RollError | None
    """The exception itself, if it is one of the framework's."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make the failure of an exception; keep the exception itself if it is a RollError that can
        be sent."""
        trace = "".join(traceback.format_exception(error))
        own = error if isinstance(error, RollError) and _can_travel(error) else None
        return cls(type(error).__name__, str(error), trace, own)


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one call."""

    number: int
    """Number of the call; see `SentCall`."""
    value: Any
    """What the method returned, without the part that stays in the object store; or a `Failure`."""
    first: int | None = None
    """Index of the first item of that part among the parts of the bundle; None: there is none."""


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class Bundle:
    """Answers that travel together."""

    answers: list[Answer]
    parts: list[Any] | None
    """Items of the divided parts, if they are small; None: they are in the object store."""


@dataclass(eq=False)
class _Box:
    """Calls of one caller: those that run, and the answers that wait to be collected."""

    running: set[int] = field(default_factory=set)
    ready: deque[tuple[int, Any, Apart | None]] = field(default_factory=deque)
    """Number of each answered call, its result or `Failure`, and how to divide the result."""
    some: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there are answers."""
    last: list[tuple[int, Any, Apart | None]] = field(default_factory=list)
    """Answers of the bundle that was sent last, until the next one is asked for; at most for
    `KEPT_S`."""
    forgetting: asyncio.TimerHandle | None = None
    """Timer that clears `last`."""

    def forget_last(self) -> None:
        """Let go of the answers of the last bundle, at once."""
        self.last = []
        if self.forgetting is not None:
            self.forgetting.cancel()
            self.forgetting = None


@dataclass(eq=False)
class BundleHost:
    """Runs the calls of bundles on the event loop of a worker, and keeps their answers."""

    run: Callable[[SentCall], Awaitable[tuple[Any, Apart | None]]]
    """Function that makes one call, and returns its result and how to divide it."""
    kept_s: float = KEPT_S
    _boxes: dict[str, _Box] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def begin(self, caller: str, calls: Iterable[SentCall]) -> None:
        """Begin calls, without waiting for them.

        Args:
            caller: name of the caller, who collects the answers.
        """
        box = self._boxes.setdefault(caller, _Box())
        for call in calls:
            box.running.add(call.number)
            task = asyncio.ensure_future(self._one(box, call))
            self._tasks.add(task)  # the loop itself keeps only weak references
            task.add_done_callback(self._tasks.discard)

    async def collect(self, caller: str) -> tuple[Bundle, list[Packed] | None]:
        """Wait until there are answers for a caller, and return them, with the parts that stay in
        the object store. One call of this method at a time."""
        box = self._boxes.setdefault(caller, _Box())
        box.forget_last()
        await box.some.wait()
        if box.running:  # others may end at the same time
            await asyncio.sleep(WINDOW_S)
        found = self._bundle(box)
        loop = asyncio.get_running_loop()
        box.forgetting = loop.call_later(self.kept_s, box.forget_last)
        return found

    def recover(self, caller: str) -> set[int]:
        """Make the answers of the last bundle ready again, because it did not arrive; one that
        cannot be sent becomes a `Failure`.

        Returns:
            The numbers of all calls that run or are ready. Others have never begun.
        """
        box = self._boxes.setdefault(caller, _Box())
        box.ready.extendleft(reversed([_checked(*one) for one in box.last]))
        box.forget_last()
        if box.ready:
            box.some.set()
        return box.running | {number for number, _, _ in box.ready}

    async def _one(self, box: _Box, call: SentCall) -> None:
        """Make one call and put its result into the box as ready; an exception becomes a
        `Failure`."""
        try:
            result, apart = await self.run(call)
        except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
            result, apart = Failure.of(error), None
        box.running.discard(call.number)
        box.ready.append((call.number, result, apart))
        box.some.set()

    def _bundle(self, box: _Box) -> tuple[Bundle, list[Packed] | None]:
        """Take ready answers out of the box until their parts have STORED_BYTES; return the bundle,
        and the parts that do not travel in it (None: all do)."""
        answers: list[Answer] = []
        parts: list[Any] = []
        packed: list[Packed] = []
        size, inline = 0, True
        while box.ready and size < STORED_BYTES:
            number, value, apart = one = box.ready.popleft()
            box.last.append(one)
            stays = None
            if apart is not None:
                value, stays = apart.divide(value)
                inline = inline and (apart.inline or not stays)
            answers.append(Answer(number, value, None if stays is None else len(parts)))
            for item in stays or ():
                parts.append(item)
                packed.append(Packed.of(item))
                size += packed[-1].num_bytes
        if not box.ready:
            box.some.clear()
        if size < INLINE_BYTES and inline and size <= SMALL_BYTES * len(parts):
            return Bundle(answers, parts), None
        if size < INLINE_BYTES:
            packed.append(Packed(bytes(INLINE_BYTES - size)))
        return Bundle(answers, None), packed


def _can_travel(error: RollError) -> bool:
    """Return whether an exception is the same after it was sent: one whose constructor takes other
    arguments than it keeps cannot be made again."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # noqa: BLE001 - whatever its pickling raises
        return False


def _checked(number: int, value: Any, apart: Apart | None) -> tuple[int, Any, Apart | None]:
    """Return the answer (number of the call, value, rule for its division) as it can be sent: with
    a `Failure` in place of a value that cannot be pickled."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever its pickling raises
        return number, Failure.of(TypeError(f"its result cannot be sent: {error}")), None
    return number, value, apart
