"""`Cluster[W]`: all workers of one role. Methods are passed as values: mypy and grep see each call.

`call` and friends run a method on every rank, `ask` on one. Subclasses decide only where calls run:
`RayCluster` in actors, `LocalCluster` in this process.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from roll.config.roles import Role
from roll.core.errors import WaitTimeoutError
from roll.core.types import RankInfo, WorkerSpec, worker_name
from roll.distributed.dispatch import Call, dispatch_of
from roll.distributed.worker import Worker

W = TypeVar("W", bound=Worker)
W_contra = TypeVar("W_contra", bound=Worker, contravariant=True)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

SLICE_S = 0.2
"""How long `both` looks at one call before it looks at the other."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a role's workers go. Roles that name the same pool are colocated.

    Example: Placement(Role.ACTOR_TRAIN, pool="train", per_worker=1, seed=7)
    """

    role: Role
    pool: str
    per_worker: int = 1
    """Devices of one worker; the pool's devices divide by it."""
    workers: int | None = None
    """Number of workers that own no device and live on the pool's devices in turn; left out: one
    per `per_worker` devices."""
    seed: int = 0
    label: str = ""
    """Tells clusters of one role apart in messages: `reward:math[0]`."""

    @property
    def name(self) -> str:
        """What the workers are called, without their rank."""
        return worker_name(self.role, self.label)


class Launcher(Protocol):
    """Starts clusters: `ResourceManager` on Ray, `LocalLauncher` in this process."""

    def start(
        self,
        worker_cls: Callable[Concatenate[WorkerSpec, P], W],
        placement: Placement,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Cluster[W]:
        """One `worker_cls(spec, *args, **kwargs)` per rank; returns when all are built.

        Raises:
            ConfigError: the pool does not exist or does not divide.
            WorkerError: a worker died or raised; its own `RollError` passes through unchanged.
            WaitTimeoutError: a worker did not come up in time.
        """
        ...


class Answers(Protocol):
    """Results on their way, one per rank."""

    def collect(self, timeout_s: float) -> list[Any]:
        """Wait for all; raises what a rank raised as soon as it did."""
        ...

    def poll(self, timeout_s: float) -> bool:
        """Wait for all at most this long; whether all are there. Raises what a rank raised."""
        ...

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        """The error that names who has not answered."""
        ...

    def done(self) -> bool: ...


class Pending(Generic[R]):
    """A call that runs on all ranks; `result` waits for it."""

    def __init__(
        self, answers: Answers, fold: Callable[[list[Any]], R], default_timeout_s: float
    ) -> None:
        self._answers = answers
        self._fold = fold
        self._default_timeout_s = default_timeout_s

    def result(self, timeout_s: float | None = None) -> R:
        """Wait and fold the ranks' results; may be asked again.

        Raises:
            WorkerError: any worker of the run died, or one of these raised.
            WaitTimeoutError: some ranks have not answered; names them.
        """
        limit_s = self._default_timeout_s if timeout_s is None else timeout_s
        return self._fold(self._answers.collect(limit_s))

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._answers.done()

    def poll(self, timeout_s: float) -> bool:
        """Wait at most this long; whether `result` returns without waiting. Raises like it."""
        return self._answers.poll(timeout_s)

    @property
    def limit_s(self) -> float:
        """How long `result` waits when it is not told."""
        return self._default_timeout_s

    def overdue(self, timeout_s: float) -> WaitTimeoutError:
        """The error of a wait that ran out."""
        return self._answers.overdue(timeout_s)


def both(one: Pending[R], other: Pending[S]) -> tuple[R, S]:
    """The results of two calls that wait for each other.

    When one of them fails, the other may never end: the first failure is raised at once.

    Raises:
        WorkerError: as `Pending.result`, of either.
        WaitTimeoutError: one has not answered within its limit.
    """
    begun = time.monotonic()
    waiting: list[Pending[Any]] = [one, other]
    while waiting:
        waiting = [pending for pending in waiting if not pending.poll(SLICE_S)]
        for pending in waiting:
            if time.monotonic() - begun > pending.limit_s:
                raise pending.overdue(pending.limit_s)
    return one.result(), other.result()


class Cluster(ABC, Generic[W]):
    """All workers of one role."""

    def __init__(
        self, role: Role, ranks: Sequence[RankInfo], call_timeout_s: float, label: str = ""
    ) -> None:
        self.role = role
        self.label = label
        self.ranks = tuple(ranks)
        self.call_timeout_s = call_timeout_s

    @property
    def name(self) -> str:
        """Role and ranks, like `actor_train[0..1]`."""
        last = len(self.ranks) - 1
        return worker_name(self.role, self.label) + (f"[0..{last}]" if last else "[0]")

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def dp_size(self) -> int:
        """Parts a batch is split into."""
        return self.ranks[0].dp_size

    @overload
    def call(
        self,
        method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...
    @overload
    def call(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run on every rank and wait: `cluster.call(ActorWorker.train, batch)`."""
        pending: Pending[Any] = self.submit(method, *args, **kwargs)
        return pending.result()

    @overload
    def submit(
        self,
        method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[R]: ...
    @overload
    def submit(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]: ...
    def submit(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Run on every rank; collect later. Overlap two roles by submitting both."""
        mode = dispatch_of(method)
        answers = self._start(method.__name__, mode.scatter(self.ranks, Call(args, kwargs)))
        return Pending(
            answers, lambda results: mode.gather(self.ranks, results), self.call_timeout_s
        )

    @overload
    def call_each(
        self,
        method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]: ...
    @overload
    def call_each(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...
    def call_each(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run on every rank; one result per rank, unfolded. Arguments fan out as usual."""
        calls = dispatch_of(method).scatter(self.ranks, Call(args, kwargs))
        return self._start(method.__name__, calls).collect(self.call_timeout_s)

    async def ask(
        self,
        rank: int,
        method: Callable[Concatenate[W, P], Awaitable[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run an asynchronous method on one rank, from any event loop; many may be in flight.

        There is no time limit: wrap it in `asyncio.timeout` where one is wanted. Cancelling the
        wait does not stop the worker.

        Raises:
            WorkerError: any worker of the run died, or this one raised.
        """
        answer: R = await self._ask(rank, method.__name__, Call(args, kwargs))
        return answer

    @abstractmethod
    def close(self, *, graceful: bool = True) -> None:
        """End the workers; a second call does nothing. Not graceful: kill them where they stand."""

    @abstractmethod
    def _start(self, method: str, calls: Sequence[Call]) -> Answers:
        """Begin one call per rank."""

    @abstractmethod
    def _ask(self, rank: int, method: str, call: Call) -> Awaitable[Any]: ...
