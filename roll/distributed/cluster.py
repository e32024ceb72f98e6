"""`Cluster[W]`: all workers of one role. Methods are passed as values: mypy and grep see each call.

`call` and friends run a method on every rank, or on those of `cluster.on(ranks)`; `ask` on one.
Subclasses decide only where calls run: `RayCluster` in actors, `LocalCluster` in this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from roll.config.sections.roles import Role
from roll.core.types import RankInfo, WorkerSpec, worker_name
from roll.distributed.dispatch import Call, dispatch_of
from roll.distributed.pending import Answers, Pending
from roll.distributed.worker import Worker

W = TypeVar("W", bound=Worker)
W_contra = TypeVar("W_contra", bound=Worker, contravariant=True)
P = ParamSpec("P")
R = TypeVar("R")


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
    replaceable: bool = False
    """A worker's death does not end the run: what concerns it raises `WorkerLostError`, and
    `Cluster.restart` starts another in its place."""

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


class Workers(ABC, Generic[W]):
    """Workers of one role that are called together: a whole cluster, or some of its ranks."""

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

    @abstractmethod
    def _start(self, method: str, calls: Sequence[Call]) -> Answers:
        """Begin one call per rank."""


class Cluster(Workers[W], Generic[W]):
    """All workers of one role."""

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def dp_size(self) -> int:
        """Parts a batch is split into."""
        return self.ranks[0].dp_size

    def on(self, ranks: Sequence[int]) -> Workers[W]:
        """These ranks, to be called together: `cluster.on([0, 2]).call(InferWorker.sleep)`.

        Folded results are those of the first one given. Batches are split over whole clusters only.

        Raises:
            ValueError: no ranks, one given twice, or one that the cluster does not have.
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
        """Run an asynchronous method on one rank, from any event loop; many may be in flight.

        There is no time limit: wrap it in `asyncio.timeout` where one is wanted. Cancelling the
        wait does not stop the worker.

        Raises:
            WorkerError: this worker raised, or one died that the run cannot do without.
            WorkerLostError: this worker died and can be restarted, or was.
        """
        answer: R = await self._ask(rank, method.__name__, Call(args, kwargs))
        return answer

    def beside(
        self, method: Callable[Concatenate[W, P], None], /, *args: P.args, **kwargs: P.kwargs
    ) -> Pending[None]:
        """Run on every rank beside the call that runs there, which it may end; collect later.

        The method runs in another thread than the others, and is to be short.
        """
        mode = dispatch_of(method)
        answers = self._start_beside(method.__name__, mode.scatter(self.ranks, Call(args, kwargs)))
        return Pending(answers, lambda _: None, self.call_timeout_s)

    @property
    @abstractmethod
    def lost(self) -> frozenset[int]:
        """Ranks whose worker is known to be dead and has not been restarted."""

    @abstractmethod
    def restart(self, rank: int, timeout_s: float | None = None) -> None:
        """End what is left of a worker, with all it started, and build another in its place.

        The new one gets the same `WorkerSpec` and the same arguments; nothing else is called on it.
        Calls that concern the old one raise `WorkerLostError`; other ranks are not disturbed.
        Blocks; any thread but an event loop's may call it, also for several ranks at once. When it
        fails the rank stays lost, and may be restarted again.

        Args:
            timeout_s: for the new one to come up, where that is less than clusters are given.

        Raises:
            ValueError: the cluster's workers are not replaceable (`Placement.replaceable`).
            WorkerLostError: the new one died, or the cluster was closed meanwhile.
            WaitTimeoutError: the old one did not end or the new one did not come up in time.
            RollError: the new one's constructor raised it.
        """

    @abstractmethod
    def end(self, rank: int) -> None:
        """End what is left of a worker, with all it started: its devices are free afterwards.

        The rank stays lost until it is restarted. Blocks; a second call does nothing.

        Raises:
            ValueError: the cluster's workers are not replaceable (`Placement.replaceable`).
            WaitTimeoutError: it did not end in time.
        """

    @abstractmethod
    def close(self, *, graceful: bool = True) -> None:
        """End the workers; a second call does nothing. Not graceful: kill them where they stand."""

    def _start(self, method: str, calls: Sequence[Call]) -> Answers:
        return self._start_on(range(self.world_size), method, calls)

    @abstractmethod
    def _start_on(self, ranks: Sequence[int], method: str, calls: Sequence[Call]) -> Answers:
        """Begin one call on each of `ranks`."""

    @abstractmethod
    def _start_beside(self, method: str, calls: Sequence[Call]) -> Answers:
        """Begin one call on each rank, whatever else runs there."""

    @abstractmethod
    def _ask(self, rank: int, method: str, call: Call) -> Awaitable[Any]: ...


class _SomeRanks(Workers[W], Generic[W]):
    """A view of a cluster; holds nothing of its own."""

    def __init__(self, cluster: Cluster[W], ranks: Sequence[int]) -> None:
        infos = [cluster.ranks[rank] for rank in ranks]
        super().__init__(cluster.role, infos, cluster.call_timeout_s, cluster.label)
        self._cluster = cluster

    def _start(self, method: str, calls: Sequence[Call]) -> Answers:
        return self._cluster._start_on([info.rank for info in self.ranks], method, calls)


def ranks_name(name: str, ranks: Sequence[int]) -> str:
    """What ranks are called together: `actor_infer[0..3]`, `actor_infer[2]`, `actor_infer[0,2]`."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 1 and list(ranks) == list(range(first, last + 1)):
        return f"{name}[{first}..{last}]"
    return f"{name}[{','.join(map(str, ranks))}]"
