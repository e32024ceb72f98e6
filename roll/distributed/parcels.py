"""Values that go from worker to worker while the driver only knows where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from roll.core.errors import WaitTimeoutError, WorkerError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parcel(Generic[T]):
    """A value in the store of the node it was packed on, freed when nobody has the parcel any more;
    without Ray the value itself."""

    content: T | ray.ObjectRef[T]


def pack(value: T) -> Parcel[T]:
    return Parcel(ray.put(value) if ray.is_initialized() else value)


def unpack(parcels: Sequence[Parcel[T]], *, timeout_s: float, what: str) -> list[T]:
    """The values; those of another node travel now, and once.

    Args:
        what: the values' name in messages.

    Raises:
        WaitTimeoutError: they did not come in time.
        WorkerError: whoever packed them is dead, and they with it.
    """
    refs = [each.content for each in parcels if isinstance(each.content, ray.ObjectRef)]
    try:
        values = dict(zip(refs, ray.get(refs, timeout=timeout_s), strict=True)) if refs else {}
    except GetTimeoutError:
        raise WaitTimeoutError(f"waited {timeout_s:g} s for {what}") from None
    except RayError as error:
        raise WorkerError(f"{what} cannot be had: {str(error).splitlines()[0]}") from error
    return [
        values[each.content] if isinstance(each.content, ray.ObjectRef) else each.content
        for each in parcels
    ]
