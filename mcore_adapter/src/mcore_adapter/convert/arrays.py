"""The few operations that conversion needs, for numpy arrays (as `Joined`) and torch tensors alike.

Files are converted with numpy: a process starts in a fraction of a second and stays small, where
importing torch takes seconds. Weights that lie in a model are torch tensors and go through the same
tables. torch is imported by no module of `mcore_adapter.convert`.

numpy knows no bfloat16 and no 8-bit floats. Their bits are moved as unsigned integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mcore_adapter.convert.joined_arrays import Joined, lay
from mcore_adapter.errors import ConversionError

if TYPE_CHECKING:
    from torch import Tensor

Bits = NDArray[Any]


@dataclass(frozen=True)
class Outline:
    """A shape without data: what an operator would make of tensors is known before any is read."""

    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> Outline:
        size, known = prod(self.shape), prod(n for n in shape if n != -1)
        if size % max(known, 1) or (-1 not in shape and size != known):
            raise ConversionError(f"a tensor of shape {list(self.shape)} is no {list(shape)}")
        return Outline(tuple(size // max(known, 1) if n == -1 else n for n in shape))

    def swapaxes(self, one: int, other: int) -> Outline:
        shape = list(self.shape)
        shape[one], shape[other] = shape[other], shape[one]
        return Outline(tuple(shape))

    def __getitem__(self, index: Any) -> Outline:
        slices = index if isinstance(index, tuple) else (index,)
        cut = [len(range(n)[s]) for n, s in zip(self.shape, slices, strict=False)]
        return Outline((*cut, *self.shape[len(cut) :]))


A = TypeVar("A", Joined, Outline, "Tensor")

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "F8_E4M3FNUZ": np.dtype("u1"),
    "F8_E5M2FNUZ": np.dtype("u1"),
    "C64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""Names of safetensors and the numpy type that holds their bits."""

FLOATS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Types that a checkpoint can be converted to, as the command line names them."""


def join(parts: Sequence[A], dim: int = 0) -> A:
    """One array of several, end to end in `dim`."""
    if len(parts) == 1:
        return parts[0]
    return cast("A", _join(parts, dim))


def _join(parts: Sequence[Any], dim: int) -> Any:
    first = parts[0]
    if isinstance(first, Joined):
        return lay(parts, dim % first.ndim)
    if isinstance(first, Outline):
        dim %= first.ndim
        total = sum(part.shape[dim] for part in parts)
        return Outline((*first.shape[:dim], total, *first.shape[dim + 1 :]))
    import torch

    return torch.cat(tuple(parts), dim)


def cut(whole: A, lengths: Sequence[int], dim: int = 0) -> list[A]:
    """Views of the given lengths, one behind the other in `dim`."""
    lead: tuple[Any, ...] = (slice(None),) * (dim % whole.ndim)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        whole[(*lead, slice(start, start + length))]
        for start, length in zip(starts, lengths, strict=True)
    ]


def zeros(like: A, shape: Sequence[int]) -> A:
    """Of the type of another."""
    return cast("A", _zeros(like, shape))


def _zeros(like: Any, shape: Sequence[int]) -> Any:
    if isinstance(like, Joined):
        return Joined((np.zeros(tuple(shape), like.dtype),))
    if isinstance(like, Outline):
        return Outline(tuple(shape))
    return like.new_zeros(tuple(shape))


def to_float(bits: Bits, dtype: str) -> NDArray[np.float32]:
    """Any of `FLOATS`, as numbers."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32, copy=False)


def from_float(values: NDArray[np.float32], dtype: str) -> Bits:
    """Numbers as one of `FLOATS`, rounded to the nearest, ties to even.

    Raises:
        OverflowError: a finite number is larger than the largest of the type.
    """
    if dtype == "BF16":
        wide = np.ascontiguousarray(values).view(np.uint32)
        rounded = (wide + (((wide >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        # rounding would carry the payload of a NaN over into an infinity
        found = np.where(np.isnan(values), (wide >> 16) | 0x40, rounded).astype(np.uint16)
        infinite = (found & 0x7FFF) == 0x7F80
    else:
        with np.errstate(over="ignore"):
            found = values.astype(DTYPES[dtype], copy=False)
        if dtype == "F32":
            return found
        infinite = np.isinf(found)
    if infinite.any():
        lost = infinite & np.isfinite(values)
        if lost.any():
            largest = np.abs(values[lost]).max()
            raise OverflowError(
                f"has {largest:.6g}, and {dtype} ends at {_LARGEST[dtype]:.6g}; choose another "
                "--dtype"
            )
    return found


_LARGEST = {"F16": 65504.0, "BF16": 3.3895314e38}


def convert(bits: Joined, dtype: str, to: str) -> Joined:
    """
    Raises:
        ConversionError: `dtype` is no floating point type that can be converted.
        OverflowError: as `from_float`.
    """
    if dtype == to:
        return bits
    if dtype not in FLOATS.values():
        raise ConversionError(f"a tensor of type {dtype} cannot become {to}; leave --dtype out")
    return Joined((from_float(to_float(np.asarray(bits), dtype), to),))
