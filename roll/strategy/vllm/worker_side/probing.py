"""Probes: vectors whose products with a matrix tell it from another (Freivalds' check)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Of the largest entry; the layer computes in this precision."""


def probe(size: int, device: torch.device) -> Tensor:
    """The same vector for the same size, everywhere: entries +1 and -1, exact in any dtype."""
    generator = torch.Generator().manual_seed(size)
    return (torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0).to(device)


def compare(what: str, answer: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """
    Args:
        dtype: what the answer was computed in.

    Raises:
        WeightSyncError: the answer to a probe is another one than is expected of the sent weights.
    """
    scale = expected.abs().max().item() if expected.numel() else 0.0
    worst = (answer - expected).abs().max().item() if expected.numel() else 0.0
    if not worst <= _TOLERANCE[dtype] * max(scale, 1e-6):
        raise WeightSyncError(
            f"{what} does not hold what was sent: its answers differ by {worst:.3g} where the "
            f"largest is {scale:.3g}"
        )


@contextmanager
def asking(path: str) -> Iterator[None]:
    """Name the layer of which a kernel refuses to answer.

    Raises:
        WeightSyncError: instead of what its kernel raised.
    """
    try:
        yield
    except Exception as error:
        raise WeightSyncError(
            f"layer {path!r} did not compute with what was sent: {type(error).__name__}: {error}"
        ) from error
