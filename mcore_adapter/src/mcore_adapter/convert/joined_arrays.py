"""Arrays that are used as one joined array without being copied together.

Operators and shard rules mostly take rows of a full tensor. These rows are written straight from
the arrays that were read. The full tensor is not built, which saves time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Joined:
    """Several arrays, end to end along `dim`, with the interface of one array.

    It has the methods that operators use. Indices must be slices. A method copies only if its
    result cannot be expressed with views of the parts.
    """

    parts: tuple[NDArray[Any], ...]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        total = sum(part.shape[self.dim] for part in self.parts)
        return (*first[: self.dim], total, *first[self.dim + 1 :])

    @property
    def ndim(self) -> int:
        return self.parts[0].ndim

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return one numpy array; copy several parts, or for another dtype. `copy` is ignored."""
        one = len(self.parts) == 1
        whole = self.parts[0] if one else np.concatenate(self.parts, axis=self.dim)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> Joined:
        """Return a slice, as views of the parts; copy only for a step along `dim` that is not 1."""
        slices = list(index if isinstance(index, tuple) else (index,))
        slices += [slice(None)] * (self.dim + 1 - len(slices))
        start, stop, step = slices[self.dim].indices(self.shape[self.dim])
        if step != 1:
            return Joined((np.asarray(self)[index],))
        found: list[NDArray[Any]] = []
        at = 0
        for part in self.parts:
            first, last = max(start - at, 0), min(stop - at, part.shape[self.dim])
            at += part.shape[self.dim]
            slices[self.dim] = slice(first, max(first, last))
            # an empty result keeps one empty part, because the shape is that of the parts
            if first < last or (at >= self.shape[self.dim] and not found):
                found.append(part[tuple(slices)])
        return Joined(tuple(found), self.dim)

    def reshape(self, *shape: int) -> Joined:
        """Reshape; `shape` must fit, which is not checked where several parts are kept.

        Copy if the parts do not divide into whole new rows, or do not lie end to end along
        dimension 0.
        """
        known = max(prod(n for n in shape if n != -1), 1)
        shape = tuple(prod(self.shape) // known if n == -1 else n for n in shape)
        rest = shape[1:]
        parts = self.along(0)
        if any(part.size % max(prod(rest), 1) for part in parts):
            return Joined((np.asarray(self).reshape(shape),))
        if len(parts) == 1:
            return Joined((parts[0].reshape(shape),))
        return Joined(tuple(part.reshape(-1, *rest) for part in parts))

    def swapaxes(self, one: int, other: int) -> Joined:
        """Swap two dimensions, both counted from 0 and up, without a copy."""
        dim = {one: other, other: one}.get(self.dim, self.dim)
        return Joined(tuple(part.swapaxes(one, other) for part in self.parts), dim)

    def along(self, dim: int) -> tuple[NDArray[Any], ...]:
        """Return arrays that, end to end along `dim`, make the same array.

        These are the parts themselves if possible, else one array that they are copied into.
        """
        return self.parts if self.dim == dim or len(self.parts) == 1 else (np.asarray(self),)


def join_end_to_end(arrays: Sequence[Joined], dim: int) -> Joined:
    """Join arrays end to end along `dim`; copy those with parts along another dimension.

    That the other dimensions agree is not checked.
    """
    return Joined(tuple(part for array in arrays for part in array.along(dim)), dim)
