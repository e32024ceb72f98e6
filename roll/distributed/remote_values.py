"""Values that travel from worker to worker; the driver passes on only their addresses."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from roll.core.errors import WaitTimeoutError, WorkerError
from roll.core.pickling import pickle_by_fields

T = TypeVar("T")

SHARED_BYTES = 1 << 20
"""Size up to which consecutive values are stored together in one object of Ray, in bytes. To store
and fetch an object takes about a millisecond, even if the object is small."""
GET_TIMEOUT_S = 600.0
"""Time limit of `RemoteValue.get`, in seconds. Values are stored before their address is known, so
the limit covers only the transfer."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A value in a list of the object store that is only read when it is opened: whoever fetches
    the list gets views of shared memory, and copies only the values that it needs."""

    data: Any
    """The pickled value, as bytes or as a view of shared memory."""

    @classmethod
    def of(cls, value: Any) -> Packed:
        return cls(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def open(self) -> Any:
        """Return the value."""
        return pickle.loads(self.data)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Packed, (pickle.PickleBuffer(self.data) if protocol >= 5 else bytes(self.data),)


@pickle_by_fields
@dataclass(frozen=True, slots=True)
class RemoteValue(Generic[T]):
    """Address of a value in Ray's object store, on the node of the process that stored the value.
    Ray frees the value when no address of it is left. Without Ray, the value itself."""

    content: list[T] | list[Packed] | ray.ObjectRef[list[T]]
    """The value and those that were stored together with it, or a reference to the list of them."""
    place: int = 0
    """Index of the value in the list."""
    node: str = ""
    """Ray's id of the node with the value; empty if it is not known."""

    def get(self) -> T:
        """Return the value; see `fetch`, which is faster for several values."""
        return fetch([self], timeout_s=GET_TIMEOUT_S, what="a value in the object store")[0]


def store(values: Sequence[T], num_bytes: Sequence[int]) -> list[RemoteValue[T]]:
    """Store values and return the address of each. Small consecutive values share one object.

    Args:
        num_bytes: size of each value, in bytes.
    """
    groups: list[list[T]] = []
    room = 0
    for value, size in zip(values, num_bytes, strict=True):
        if not groups or size > room:
            groups.append([])
            room = SHARED_BYTES
        groups[-1].append(value)
        room -= size
    remote_values = []
    for group in groups:
        content = ray.put(group) if ray.is_initialized() else group
        remote_values += [RemoteValue(content, place) for place in range(len(group))]
    return remote_values


def fetch(remote_values: Sequence[RemoteValue[T]], *, timeout_s: float, what: str) -> list[T]:
    """Return the values at these addresses. Objects on other nodes are transferred now, each once.

    Args:
        timeout_s: time limit, in seconds.
        what: name of the values for error messages.

    Raises:
        WaitTimeoutError: the values did not arrive in time.
        WorkerError: the values are lost, because the process that stored them is dead.
    """
    refs = {p.content for p in remote_values if isinstance(p.content, ray.ObjectRef)}
    ordered = list(refs)
    try:
        found = ray.get(ordered, timeout=timeout_s) if ordered else []
    except GetTimeoutError:
        raise WaitTimeoutError(f"waited {timeout_s:g} s for {what}") from None
    except RayError as error:
        raise WorkerError(f"{what} cannot be had: {str(error).splitlines()[0]}") from error
    fetched = dict(zip(ordered, found, strict=True))
    values: list[Any] = [
        (fetched[p.content] if isinstance(p.content, ray.ObjectRef) else p.content)[p.place]
        for p in remote_values
    ]
    return [value.open() if isinstance(value, Packed) else value for value in values]
