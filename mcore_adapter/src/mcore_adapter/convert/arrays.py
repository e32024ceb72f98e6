"""Array operations of the conversion, for numpy arrays (as `Joined`) and torch tensors alike.

Files are converted with numpy, because a process with numpy starts in a fraction of a second and
needs little memory, while importing torch takes seconds. The weights of a model in memory are torch
tensors and are converted with the same tables. Importing `mcore_adapter.convert` does not import
torch.

numpy has no bfloat16 and no 8-bit floats. Their bits are moved as unsigned integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from mcore_adapter.convert.joined_arrays import Joined, join_end_to_end
from mcore_adapter.errors import ConversionError

if TYPE_CHECKING:
    from torch import Tensor

Bits = NDArray[Any]
"""Array of the bits of a tensor, of a numpy type in `DTYPES`."""


@dataclass(frozen=True)
class Outline:
    """Shape without data. Operators that run on outlines give result shapes before any reading."""

    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> Outline:
        """Return the outline of the new shape; one length may be -1.

        Raises:
            ConversionError: the new shape has another number of entries.
        """
        size, known = prod(self.shape), prod(n for n in shape if n != -1)
        if size % max(known, 1) or (-1 not in shape and size != known):
            raise ConversionError(f"a tensor of shape {list(self.shape)} is no {list(shape)}")
        return Outline(tuple(size // max(known, 1) if n == -1 else n for n in shape))

    def swapaxes(self, one: int, other: int) -> Outline:
        """Return the outline with two dimensions exchanged."""
        shape = list(self.shape)
        shape[one], shape[other] = shape[other], shape[one]
        return Outline(tuple(shape))

    def __getitem__(self, index: Any) -> Outline:
        """Return the outline of a part; each index must be a slice, not a number."""
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
"""The numpy type that holds the bits of each safetensors type, by safetensors name."""

FLOATS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Safetensors name of each type that a checkpoint can be converted to, by command-line name."""


def join(parts: Sequence[A], dim: int = 0) -> A:
    """Return one array that has the given arrays, at least one, end to end along `dim`."""
    if len(parts) == 1:
        return parts[0]
    return cast("A", _join(parts, dim))


def _join(parts: Sequence[Any], dim: int) -> Any:
    """Join arrays along `dim`: numpy ones without a copy, outlines by shape, tensors by `cat`."""
    first = parts[0]
    if isinstance(first, Joined):
        return join_end_to_end(parts, dim % first.ndim)
    if isinstance(first, Outline):
        dim %= first.ndim
        total = sum(part.shape[dim] for part in parts)
        return Outline((*first.shape[:dim], total, *first.shape[dim + 1 :]))
    import torch

    return torch.cat(tuple(parts), dim)


def cut(whole: A, lengths: Sequence[int], dim: int = 0) -> list[A]:
    """Return consecutive views of the given lengths along `dim`, from its start.

    Nothing is checked: if the lengths add up to less than the array's, the rest is left out; if
    they add up to more, the last views are too short or empty.
    """
    lead: tuple[Any, ...] = (slice(None),) * (dim % whole.ndim)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        whole[(*lead, slice(start, start + length))]
        for start, length in zip(starts, lengths, strict=True)
    ]


def zeros(like: A, shape: Sequence[int]) -> A:
    """Return zeros of the given shape, of the same class, data type and device as `like`."""
    return cast("A", _zeros(like, shape))


def _zeros(like: Any, shape: Sequence[int]) -> Any:
    """Return zeros of the class of `like`; see `zeros`, which has the types."""
    if isinstance(like, Joined):
        return Joined((np.zeros(tuple(shape), like.dtype),))
    if isinstance(like, Outline):
        return Outline(tuple(shape))
    return like.new_zeros(tuple(shape))


def to_float(bits: Bits, dtype: str) -> NDArray[np.float32]:
    """Return the float32 values of an array of bits of the safetensors type `dtype`.

    The type must be one that numpy has, or BF16: 8-bit floats would be read as whole numbers.
    """
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32, copy=False)


def from_float(values: NDArray[np.float32], dtype: str) -> Bits:
    """Return the values as bits of the safetensors type `dtype`, one in `FLOATS`; round to nearest,
    ties to even.

    Raises:
        OverflowError: a finite value is beyond the largest value of the type.
    """
    if dtype == "BF16":
        wide = np.ascontiguousarray(values).view(np.uint32)
        rounded = (wide + (((wide >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        # rounding could turn a NaN into an infinity, so a NaN is truncated and made quiet instead
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
"""Largest finite value of each type that is narrower than float32."""


def convert(bits: Joined, dtype: str, to: str) -> Joined:
    """Convert an array from one data type to another; return the same object if they are equal.

    Args:
        bits: values of the type `dtype`.
        dtype: safetensors name of the present type.
        to: safetensors name of the new type, one in `FLOATS`.

    Raises:
        ConversionError: `dtype` is no floating point type in `FLOATS`.
        OverflowError: a finite value is beyond the largest value of the new type.
    """
    if dtype == to:
        return bits
    if dtype not in FLOATS.values():
        raise ConversionError(f"a tensor of type {dtype} cannot become {to}; leave --dtype out")
    return Joined((from_float(to_float(np.asarray(bits), dtype), to),))
