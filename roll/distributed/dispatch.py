"""`Dispatch`: how one call of the driver is split over ranks and how the results are combined.

A decorator attaches a `Dispatch` to a worker method. `gather` returns the type that the method
returns, so a call through a cluster has the same type as the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from roll.core.types import RankInfo

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call on one rank."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Concatenable(Protocol):
    """A result type with a classmethod that joins several results, such as `Batch`, `Metrics`."""

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self: ...


@dataclass(frozen=True, slots=True)
class Apart:
    """A rule for results of which a part stays in the object store when `Cluster.ask` gets them."""

    divide: Callable[[Any], tuple[Any, list[Any] | None]]
    """Function from a result to what the caller gets, and the list that stays; None in place of the
    list if the caller gets everything."""
    join: Callable[[Any, Callable[[int], Any]], Any]
    """Function from what the caller got, and a function that returns the address of an item of the
    list, to the method's return type."""
    inline: bool = True
    """Whether a list that is small may travel to the caller beside the answer. False: the caller
    gets no item, however small, so that it need not send them to others."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A rule for the arguments and the results of a call that runs on several ranks."""

    scatter: Callable[[Sequence[RankInfo], Call], list[Call]]
    """Function from the ranks and the driver's call to one call per rank, in the same order."""
    gather: Callable[[Sequence[RankInfo], list[Any]], Any]
    """Function from the ranks and their results, in the same order, to one value of the method's
    return type."""
    leaders_only: bool = False
    """True if `gather` uses only the results of data-parallel leaders. Other ranks need not send
    theirs."""
    apart: Apart | None = None
    """Part of a result that stays in the object store; None: the caller gets all of it."""


def _same_call(ranks: Sequence[RankInfo], call: Call) -> list[Call]:
    return [call] * len(ranks)


def _first_result(ranks: Sequence[RankInfo], results: list[Any]) -> Any:
    return results[0]


def _joined_results(ranks: Sequence[RankInfo], results: list[Any]) -> Any:
    return [item for result in results for item in result]


def _least_result(ranks: Sequence[RankInfo], results: list[Any]) -> Any:
    return min(results)


def _shard_batches(ranks: Sequence[RankInfo], call: Call) -> list[Call]:
    """Return one call per rank, in the order of `ranks`: each Batch is split into `dp_size` parts,
    of which a rank gets the part of its data-parallel rank; all else is repeated.

    Raises:
        ValueError: a data-parallel rank is missing in `ranks`, or a batch does not divide into
            equal parts.
    """
    from roll.core.batch import Batch  # here: a worker without tensors loads no torch

    parts = ranks[0].dp_size
    if {info.dp_rank for info in ranks} != set(range(parts)):
        some = ", ".join(str(info.rank) for info in ranks)
        raise ValueError(
            f"a batch is split over all {parts} data-parallel ranks, but only rank {some} is "
            "called; call the whole cluster"
        )

    def shards(value: Any) -> list[Any]:
        return list(value.split(parts)) if isinstance(value, Batch) else [value] * parts

    args = [shards(value) for value in call.args]
    kwargs = {name: shards(value) for name, value in call.kwargs.items()}
    return [
        Call(
            tuple(each[info.dp_rank] for each in args),
            {name: each[info.dp_rank] for name, each in kwargs.items()},
        )
        for info in ranks
    ]


def _concat_leaders(ranks: Sequence[RankInfo], results: list[Any]) -> Any:
    """Concatenate the results of the data-parallel leaders, in the order of their data-parallel
    ranks; None if all are None, TypeError if they are not of one type with `concat`."""
    by_rank = {info.dp_rank: i for i, info in enumerate(ranks) if info.is_dp_leader}
    parts = [results[by_rank[dp_rank]] for dp_rank in sorted(by_rank)]
    if all(part is None for part in parts):
        return None
    kinds = {type(part) for part in parts}
    if len(kinds) > 1 or not isinstance(parts[0], Concatenable):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(
            f"a method dispatched with SHARD_BATCH returned {names}; it must return one type with "
            "a classmethod `concat` (like Batch or Metrics), or None, on every data-parallel leader"
        )
    return kinds.pop().concat(parts)


BROADCAST = Dispatch(_same_call, _first_result)
"""Give every rank the same arguments; return the result of the first rank. This is also the rule
for methods without `@dispatch`."""

LEAST = Dispatch(_same_call, _least_result)
"""Give every rank the same arguments; return the smallest result."""

JOIN = Dispatch(_same_call, _joined_results)
"""Give every rank the same arguments; join the lists that the ranks return, in their order."""

SHARD_BATCH = Dispatch(_shard_batches, _concat_leaders, leaders_only=True)
"""Split arguments that are batches over the data-parallel ranks, and give every rank the other
arguments. Join the results of the data-parallel leaders with `concat`."""

_ATTRIBUTE = "__roll_dispatch__"


def dispatch(mode: Dispatch) -> Callable[[F], F]:
    """Return a decorator that attaches `mode` to a worker method, which stays callable directly."""

    def mark(method: F) -> F:
        setattr(method, _ATTRIBUTE, mode)
        return method

    return mark


def dispatch_of(method: Callable[..., Any]) -> Dispatch:
    """Return the mode that `dispatch` attached to a method; BROADCAST if none is attached."""
    mode = getattr(method, _ATTRIBUTE, BROADCAST)
    assert isinstance(mode, Dispatch)
    return mode
