"""Recipes: how the values of a tensor are made of those in files, part by part.

A recipe reads a box (a range of each axis) into memory of the caller, so what a rank reads needs no
memory but that of its part. Recipes are values and may be read from several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Box = tuple[tuple[int, int], ...]
"""Begin and end of a range of each axis."""


class Recipe(Protocol):
    """Values that can be read in parts."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def cast(self, dtype: torch.dtype) -> Recipe:
        """Return the recipe of the same values, converted."""
        ...

    def read(self, box: Box, out: Tensor) -> None:
        """Write the values in a box to `out`, which has the shape of the box."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A box of another tensor."""

    source: Recipe
    box: Box

    @property
    def shape(self) -> torch.Size:
        return torch.Size(end - begin for begin, end in self.box)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def cast(self, dtype: torch.dtype) -> Part:
        return Part(self.source.cast(dtype), self.box)

    def read(self, box: Box, out: Tensor) -> None:
        inner = zip(box, self.box, strict=True)
        self.source.read(tuple((b + own[0], e + own[0]) for (b, e), own in inner), out)


@dataclass(frozen=True, slots=True, eq=False)
class Permuted:
    """Another tensor with its axes in another order, as `Tensor.permute` says."""

    source: Recipe
    order: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.source.shape[i] for i in self.order)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def cast(self, dtype: torch.dtype) -> Permuted:
        return Permuted(self.source.cast(dtype), self.order)

    def read(self, box: Box, out: Tensor) -> None:
        back = [self.order.index(i) for i in range(len(self.order))]
        self.source.read(tuple(box[i] for i in back), out.permute(back))


@dataclass(frozen=True, slots=True, eq=False)
class Unsqueezed:
    """Another tensor with one more axis of size 1."""

    source: Recipe
    axis: int

    @property
    def shape(self) -> torch.Size:
        own = list(self.source.shape)
        own.insert(self.axis, 1)
        return torch.Size(own)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def cast(self, dtype: torch.dtype) -> Unsqueezed:
        return Unsqueezed(self.source.cast(dtype), self.axis)

    def read(self, box: Box, out: Tensor) -> None:
        if out.numel():
            self.source.read(box[: self.axis] + box[self.axis + 1 :], out.select(self.axis, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Squeezed:
    """Another tensor without an axis of size 1."""

    source: Recipe
    axis: int

    @property
    def shape(self) -> torch.Size:
        own = list(self.source.shape)
        del own[self.axis]
        return torch.Size(own)

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def cast(self, dtype: torch.dtype) -> Squeezed:
        return Squeezed(self.source.cast(dtype), self.axis)

    def read(self, box: Box, out: Tensor) -> None:
        self.source.read((*box[: self.axis], (0, 1), *box[self.axis :]), out.unsqueeze(self.axis))


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Several tensors of one dtype, one behind the other along an axis, as `torch.cat` says."""

    parts: tuple[Recipe, ...]
    axis: int

    @property
    def shape(self) -> torch.Size:
        own = list(self.parts[0].shape)
        own[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return torch.Size(own)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def cast(self, dtype: torch.dtype) -> Joined:
        return Joined(tuple(part.cast(dtype) for part in self.parts), self.axis)

    def read(self, box: Box, out: Tensor) -> None:
        first, end = box[self.axis]
        begin = 0
        for part in self.parts:
            size = part.shape[self.axis]
            a, b = max(first, begin), min(end, begin + size)
            if a < b:
                inner = (*box[: self.axis], (a - begin, b - begin), *box[self.axis + 1 :])
                part.read(inner, out.narrow(self.axis, a - first, b - a))
            begin += size


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """Result of a function of whole tensors, for what has no recipe of its own.

    Each reading computes the whole result.

    Args:
        arguments: recipes stand for the tensors that they make.
        like: tensor without values, in the shape of the result.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    like: Tensor
    place: int | None
    """Index of the tensor in the result, if that is a list."""

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def cast(self, dtype: torch.dtype) -> Recipe:
        if dtype == self.dtype:
            return self
        return Computed(Tensor.to, (self, dtype), {}, self.like.to(dtype), None)

    def read(self, box: Box, out: Tensor) -> None:
        result = self.function(*realized(self.arguments), **realized(self.keywords))
        whole = result if self.place is None else result[self.place]
        out.copy_(whole[tuple(slice(*each) for each in box)])


def whole_box(shape: torch.Size) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def values(recipe: Recipe) -> Tensor:
    """Return all values on the CPU."""
    out = torch.empty(recipe.shape, dtype=recipe.dtype)
    recipe.read(whole_box(recipe.shape), out)
    return out


def realized(tree: Any) -> Any:
    """Return a tree of arguments with values in place of recipes."""
    return tree_map(lambda each: values(each) if _is_recipe(each) else each, tree)


def _is_recipe(value: object) -> bool:
    return hasattr(value, "read") and hasattr(value, "cast")


def read_run(recipe: Recipe, first: int, out: Tensor) -> None:
    """Write a run of the flattened elements, from element `first` on, to `out`, which is flat."""
    begin = 0
    for box in run_boxes(recipe.shape, first, first + out.numel()):
        sizes = [end - start for start, end in box]
        count = torch.Size(sizes).numel()
        recipe.read(box, out[begin : begin + count].view(sizes))
        begin += count


def run_boxes(shape: torch.Size, first: int, end: int) -> Iterator[Box]:
    """Yield in order boxes of the elements `first` to `end` of an array in row-major order."""
    if first >= end:
        return
    if not shape:
        yield ()
        return
    row = shape[1:].numel()
    top, bottom = -(-first // row), end // row
    if top > bottom:  # inside of one row
        yield from _in_row(shape, bottom, first, end)
        return
    if first < top * row:
        yield from _in_row(shape, top - 1, first, top * row)
    if top < bottom:
        yield ((top, bottom), *whole_box(shape[1:]))
    if bottom * row < end:
        yield from _in_row(shape, bottom, bottom * row, end)


def _in_row(shape: torch.Size, row: int, first: int, end: int) -> Iterator[Box]:
    """Yield the boxes of elements of the array that are all in one of its rows."""
    skipped = row * shape[1:].numel()
    for inner in run_boxes(shape[1:], first - skipped, end - skipped):
        yield ((row, row + 1), *inner)
