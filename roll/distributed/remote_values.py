"""Values that go from worker to worker while the driver only knows where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from roll.core.errors import WaitTimeoutError, WorkerError

T = TypeVar("T")

SHARED_BYTES = 1 << 20
"""Of values that go into one object: to store one and to fetch it takes about a millisecond,
whatever its size."""


@dataclass(frozen=True, slots=True)
class RemoteValue(Generic[T]):
    """A value in the store of the node it was packed on, freed when nobody has it any more;
    without Ray the value itself."""

    content: list[T] | ray.ObjectRef[list[T]]
    """It, and those that were packed with it."""
    place: int = 0


def store(values: Sequence[T], num_bytes: Sequence[int]) -> list[RemoteValue[T]]:
    """Store values, return an address of each; small neighbours share an object.

    Args:
        num_bytes: of the values.
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
    """The values; those of another node travel now, and once.

    Args:
        what: the values' name in messages.

    Raises:
        WaitTimeoutError: they did not come in time.
        WorkerError: whoever packed them is dead, and they with it.
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
    return [
        (fetched[p.content] if isinstance(p.content, ray.ObjectRef) else p.content)[p.place]
        for p in remote_values
    ]
