"""`Cluster[W]`: all workers of one role.

Methods are passed as values, so that mypy checks each call and a text search finds it. `call`,
`submit` and `call_each` run a method on every rank, or on some ranks with `cluster.on(ranks)`;
`ask` runs a method on one rank. Subclasses define where calls run: `RayCluster` in Ray actors,
`LocalCluster` in this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from roll.config.sections.roles import Role
from roll.core.types import RankInfo, WorkerSpec, worker_name
from roll.distributed.dispatch import JOIN, Apart, Call, dispatch_of
from roll.distributed.pending import Answers, Pending
from roll.distributed.worker import Worker

W = TypeVar("W", bound=Worker)
W_contra = TypeVar("W_contra", bound=Worker, contravariant=True)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices on which the workers of one role run. Roles with the same pool are colocated:
    they share its devices.

    Example: Placement(Role.ACTOR_TRAIN, pool="train", per_worker=1, seed=7)
    """

    role: Role
    pool: str | None
    """Name of the pool; None: the machine of the driver, whether it has devices of the run or
    not."""
    per_worker: int = 1
    """Number of devices per worker; the number of devices in the pool must be a multiple of it."""
    workers: int | None = None
    """Number of workers, for workers that own no device: they are spread over the pool's devices in
    turn. None: one worker per `per_worker` devices."""
    seed: int = 0
    label: str = ""
    """Label that distinguishes clusters of the same role, as `math` does in `reward:math[0]`."""
    replaceable: bool = False
    """True if the death of a worker does not end the run: calls to the dead worker raise
    `WorkerLostError`, and `Cluster.restart` starts a new worker in its place."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of these workers alone."""
    under: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Command before that of the interpreter, by rank: a program that starts the worker and records
    what it does."""

    @property
    def name(self) -> str:
        """Name of the workers, without a rank."""
        return worker_name(self.role, self.label)


class Launcher(Protocol):
    """Interface that starts clusters: `ResourceManager` on Ray, `LocalLauncher` in this process."""

    def start(
        self,
        worker_cls: Callable[Concatenate[WorkerSpec, P], W],
        placement: Placement,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Cluster[W]:
        """Build `worker_cls(spec, *args, **kwargs)` on every rank. Return when all are built.

        Raises:
            ConfigError: the pool does not exist, or its devices do not divide into workers.
            WorkerError: a worker died or raised an exception; a `RollError` of a worker is raised
                unchanged.
            WaitTimeoutError: a worker did not start in time.
        """
        ...


class Workers(ABC, Generic[W]):
    """Workers of one role that are called together: all ranks of a cluster, or some of them.

    Args:
        ranks: the ranks, in the order in which calls and results are listed.
        call_timeout_s: default time limit of a call, in seconds.
        label: label of `Placement`; empty if there is one cluster of the role.
    """

    def __init__(
        self, role: Role, ranks: Sequence[RankInfo], call_timeout_s: float, label: str = ""
    ) -> None:
        self.role = role
        self.label = label
        self.ranks = tuple(ranks)
        self.call_timeout_s = call_timeout_s

    @property
    def name(self) -> str:
        """Role and ranks, such as `actor_train[0..1]`."""
        return ranks_name(worker_name(self.role, self.label), [info.rank for info in self.ranks])

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
        """Run the method on every rank, wait at most `call_timeout_s`, return the combined result.

        Arguments and results go by the method's `@dispatch`; without one, by BROADCAST. The errors
        are those of `Pending.result`.

        Example: `cluster.call(ActorWorker.train, batch)`.
        """
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
        """Start the method on every rank, without waiting; arguments and results go as in `call`.

        Two roles work at the same time if the driver submits both calls before it waits for their
        results. Errors of ranks are raised by `Pending.result`, not here.
        """
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
        """Run the method on every rank, wait, and return the results of all ranks in a list.

        Arguments, time limit and errors are those of `call`; results are not combined. Where
        `@dispatch` uses only the results of data-parallel leaders, others may be None.
        """
        calls = dispatch_of(method).scatter(self.ranks, Call(args, kwargs))
        return self._start(method.__name__, calls).collect(self.call_timeout_s)

    @abstractmethod
    def _start(self, method: str, calls: Sequence[Call]) -> Answers:
        """Start the method with the name `method` on all these ranks, without waiting: the call
        `calls[i]` on the i-th of them."""


class Cluster(Workers[W], Generic[W]):
    """All workers of one role and label."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.ranks)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel parts into which a batch is split."""
        return self.ranks[0].dp_size

    def on(self, ranks: Sequence[int]) -> Workers[W]:
        """Return a view of some ranks: `cluster.on([0, 2]).call(InferWorker.sleep)`.

        Where the result of one rank stands for all, it is that of the first rank in `ranks`.
        Methods that split a batch need the whole cluster.

        Raises:
            ValueError: `ranks` is empty, or names a rank twice, or one that does not exist.
        """
        known = set(ranks) & set(range(self.world_size))
        if not ranks or len(known) < len(ranks):
            raise ValueError(f"{self.name}: {list(ranks)} is not a list of some of its ranks")
        return _SomeRanks(self, ranks)

    async def ask(
        self,
        rank: int,
        method: Callable[Concatenate[W, P], Awaitable[R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run an asynchronous method on one rank, from any event loop. Many may run at a time.

        Arguments and result are passed as they are. A method whose `@dispatch` uses only the
        results of data-parallel leaders may give None on other ranks.

        There is no time limit: for one, use `asyncio.timeout` around the call. Cancelling the wait
        does not stop the method in the worker.

        Raises:
            WorkerError: this worker raised an exception, or a worker that is not replaceable died.
            WorkerLostError: this worker died or was ended; it is replaceable.
        """
        apart = dispatch_of(method).apart
        answer: R = await self._ask(rank, method.__name__, Call(args, kwargs), apart)
        return answer

    def beside(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[R]:
        """Start a short method on every rank, without waiting, while another call runs there, for
        example to end that call. It runs in a different thread from the worker's other methods;
        arguments and results go as in `call`. If lists are joined, those of the further parts of
        workers on several nodes come last."""
        mode = dispatch_of(method)
        calls = mode.scatter(self.ranks, Call(args, kwargs))
        answers = self._start_beside(method.__name__, calls, parts=mode is JOIN)
        return Pending(
            answers, lambda results: mode.gather(self.ranks, results), self.call_timeout_s
        )

    @property
    @abstractmethod
    def lost(self) -> frozenset[int]:
        """Ranks whose worker is known to be dead and has not been replaced yet."""

    @abstractmethod
    def restart(self, rank: int, timeout_s: float | None = None) -> None:
        """End a worker and all processes that it started, and build a new worker in its place.

        The new worker gets the same `WorkerSpec` and the same arguments. Only its constructor is
        called: other calls that it needs, such as `InferWorker.start`, are left to the caller.
        Calls to the old worker raise `WorkerLostError`; other ranks are not affected. The method
        blocks, so do not call it on an event loop. Several threads may restart different ranks at
        the same time. After a failed restart the rank is still lost; it may be tried again.

        Args:
            rank: rank of the worker.
            timeout_s: time limit for the start of the new worker, in seconds; by default, and at
                most, the start limit of clusters. The end of the old worker has a limit of its own.

        Raises:
            ValueError: the workers of this cluster are not replaceable (`Placement.replaceable`).
            WorkerLostError: the new worker died, or the cluster was closed meanwhile.
            WaitTimeoutError: the old worker did not end in time, or the new one did not start.
            WorkerError: the constructor of the new worker raised an exception; a `RollError` is
                raised unchanged.
        """

    @abstractmethod
    def end(self, rank: int) -> None:
        """End a worker and all processes that it started, so that its devices are free afterwards.

        The rank stays lost until it is restarted. The method blocks until the processes have ended.
        A second call does nothing.

        Raises:
            ValueError: the workers of this cluster are not replaceable (`Placement.replaceable`).
            WaitTimeoutError: the worker did not end in time.
        """

    @abstractmethod
    def close(self, *, graceful: bool = True) -> None:
        """End all workers. A second call does nothing.

        Args:
            graceful: call `Worker.close` on each worker first; otherwise end them at once. If a
                `close` fails or takes too long, all workers are ended before the error is raised.
        """

    def _start(self, method: str, calls: Sequence[Call]) -> Answers:
        return self._start_on(range(self.world_size), method, calls)

    @abstractmethod
    def _start_on(self, ranks: Sequence[int], method: str, calls: Sequence[Call]) -> Answers:
        """Start the method with the name `method`, without waiting: the call `calls[i]` on the rank
        `ranks[i]`."""

    @abstractmethod
    def _start_beside(self, method: str, calls: Sequence[Call], *, parts: bool) -> Answers:
        """Start the method with the name `method`, even while another call runs: the call
        `calls[i]` on rank i and, with `parts`, on the further parts of its worker, whose answers
        come last."""

    @abstractmethod
    def _ask(self, rank: int, method: str, call: Call, apart: Apart | None) -> Awaitable[Any]:
        """Call an asynchronous method on one rank; return the answer, to be awaited.

        Args:
            apart: rule for a part of the result that stays in the object store, if there is one.
        """
        ...


class _SomeRanks(Workers[W], Generic[W]):
    """A view of some ranks of a cluster."""

    def __init__(self, cluster: Cluster[W], ranks: Sequence[int]) -> None:
        infos = [cluster.ranks[rank] for rank in ranks]
        super().__init__(cluster.role, infos, cluster.call_timeout_s, cluster.label)
        self._cluster = cluster

    def _start(self, method: str, calls: Sequence[Call]) -> Answers:
        return self._cluster._start_on([info.rank for info in self.ranks], method, calls)


def ranks_name(name: str, ranks: Sequence[int]) -> str:
    """Return a name for several ranks: `actor_infer[0..3]`, `actor_infer[2]`,
    `actor_infer[0,2]`."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and list(ranks) == list(range(first, last + 1)):
        return f"{name}[{first}..{last}]"
    return f"{name}[{','.join(map(str, ranks))}]"
