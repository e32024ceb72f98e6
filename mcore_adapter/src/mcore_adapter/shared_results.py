"""Results and failures that all ranks share, so that none waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from mcore_adapter.errors import ConversionError, McoreAdapterError

T = TypeVar("T")


def gather_results(work: Callable[[], T], what: str) -> list[T]:
    """Run `work` on this rank and return the results of all ranks, in their order. A collective.

    Args:
        work: function whose results can be pickled; it must take part in its own collectives to
            their end, also if it fails.
        what: what is written, for the message.

    Raises:
        ConversionError: on all ranks, if `work` failed on any rank.
        Exception: on the rank itself, an error of `work` that is neither of this package nor of
            the system.
    """
    mine: tuple[T | None, str | None]
    unexpected: Exception | None = None
    try:
        mine = work(), None
    except (McoreAdapterError, OSError) as error:
        mine = None, str(error)
    except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know of it
        mine, unexpected = (None, f"{type(error).__name__}: {error}"), error
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if unexpected is not None:
        raise unexpected
    for rank, (_, problem) in enumerate(every):
        if problem is not None:
            raise ConversionError(f"rank {rank} cannot write {what}: {problem}")
    return [found for found, _ in every]
