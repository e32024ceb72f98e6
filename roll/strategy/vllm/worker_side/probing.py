"""Probe vectors, whose products with matrices tell different ones apart (Freivalds' check)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Dtype in which a layer computes -> largest allowed error, relative to the largest entry."""
_TF32_TOLERANCE = 5e-3
"""The same for kernels that cut the factors of products in float32 to the 10 bits of TF32."""


def probe(size: int, device: torch.device) -> Tensor:
    """Return the probe of a size, float32 `[size]`, with random entries +1 and -1.

    The probe of a size is the same in every process. Its entries are exact in any dtype.
    """
    generator = torch.Generator().manual_seed(size)
    return (torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0).to(device)


def compare(
    what: str, answer: Tensor, expected: Tensor, dtype: torch.dtype, *, tf32: bool = False
) -> None:
    """Compare a layer's answer to a probe with that of the weights that were sent.

    Args:
        what: name of the layer in the error message.
        dtype: dtype in which the layer computed the answer.
        tf32: True if its kernel may use TF32 where that is float32.

    Raises:
        WeightSyncError: the answers differ by more than rounding explains.
    """
    scale = expected.abs().max().item() if expected.numel() else 0.0
    worst = (answer - expected).abs().max().item() if expected.numel() else 0.0
    rounds = tf32 and dtype is torch.float32
    tolerance = _TF32_TOLERANCE if rounds else _TOLERANCE[dtype]
    if not worst <= tolerance * max(scale, 1e-6):
        raise WeightSyncError(
            f"{what} does not hold what was sent: its answers differ by {worst:.3g} where the "
            f"largest is {scale:.3g}"
        )


@contextmanager
def asking(path: str) -> Iterator[None]:
    """Turn any error of a layer's kernel into one that names the layer.

    Raises:
        WeightSyncError: the kernel failed.
    """
    try:
        yield
    except Exception as error:
        raise WeightSyncError(
            f"layer {path!r} did not compute with what was sent: {type(error).__name__}: {error}"
        ) from error
