"""Tensors without memory, whose values are read from files when they are copied.

A `Deferred` has shape, dtype and device of a tensor. Views, conversions of dtype, joining and
splitting make other `Deferred`s. Values are read by `copy_` into a tensor with memory, which FSDP2
does with the part of a rank, or by `realize`. So transformers may load, rename and fuse the tensors
of a checkpoint, and nothing is read that is not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from roll.models.deferred import recipes
from roll.models.deferred.files import passing
from roll.models.deferred.recipes import Computed, Joined, Part, Permuted, Recipe, whole_box

_ATEN = torch.ops.aten
_ROWS_AT_ONCE_BYTES = 2**24


class Deferred(Tensor):
    """Tensor whose values a recipe makes; see the head of this file."""

    recipe: Recipe

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, recipe: Recipe, device: torch.device | str = "cpu") -> Deferred:
        made: Deferred = torch.Tensor._make_wrapper_subclass(
            cls, recipe.shape, dtype=recipe.dtype, device=torch.device(device), requires_grad=False
        )
        made.recipe = recipe
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Deferred({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # `func` has no type in torch either
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.copy_.default and not isinstance(args[0], Deferred):
            return _copy(*args)
        if func is _ATEN.equal.default:
            return _equal(*args)
        if func in _MAKERS:
            return _made(func, args, kwargs)
        if func in _VIEWS:
            return _VIEWS[func](*args, **kwargs)
        if func._schema.is_mutable:
            raise TypeError(f"{func} would write into a tensor that is still in its file")
        return _computed(func, args, kwargs)


def _copy(target: Tensor, source: Deferred, non_blocking: bool = False) -> Tensor:
    """Read a tensor into memory; both have the same shape, or it has fewer axes."""
    recipe = source.recipe
    if target.shape == source.shape and target.dtype == source.dtype:
        recipe.read(whole_box(recipe.shape), target)
    elif target.shape == source.shape:
        recipe.cast(target.dtype).read(whole_box(recipe.shape), target)
    else:
        target.copy_(recipes.values(recipe))
    return target


def _equal(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors, some rows at a time."""
    if one.shape != other.shape:
        return False
    rows = one.shape[0] if one.ndim else 1
    step = max(1, _ROWS_AT_ONCE_BYTES * rows // max(1, one.numel() * one.element_size()))
    for first in range(0, rows, step):
        part = [_rows(each, first, min(first + step, rows)) for each in (one, other)]
        if not torch.equal(*part):
            return False
    return True


def _rows(tensor: Tensor, first: int, end: int) -> Tensor:
    """Return rows of a tensor with their values; all of a scalar."""
    part = tensor[first:end] if tensor.ndim else tensor
    return recipes.values(part.recipe) if isinstance(part, Deferred) else part


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Run a function that makes a new tensor like another one, which need not have values."""
    example, *rest = args
    kwargs = {"device": example.device, "dtype": example.dtype} | {
        name: value for name, value in kwargs.items() if value is not None
    }
    made: Tensor = func(_without_values(example), *rest, **kwargs)
    return made


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Defer a function without a recipe of its own; run it now if its result is no tensor."""

    def given(value: Any) -> Any:
        return value.recipe if isinstance(value, Deferred) else value

    arguments, keywords = tree_map(given, args), tree_map(given, kwargs)
    if any("Tensor" not in str(each.type) for each in func._schema.returns):
        return func(*recipes.realized(arguments), **recipes.realized(keywords))

    def empty(value: Any) -> Any:
        return _without_values(value) if isinstance(value, Tensor) else value

    like = func(*tree_map(empty, args), **tree_map(empty, kwargs))
    if isinstance(like, Tensor):
        return Deferred(Computed(func, arguments, keywords, like, None))
    return type(like)(
        Deferred(Computed(func, arguments, keywords, each, i)) for i, each in enumerate(like)
    )


def _same(tensor: Deferred, **_: Any) -> Deferred:
    return Deferred(tensor.recipe, tensor.device)


def _to_copy(tensor: Deferred, *, dtype: Any = None, device: Any = None, **_: Any) -> Deferred:
    return Deferred(tensor.recipe.cast(dtype or tensor.dtype), device or tensor.device)


def _boxed(tensor: Deferred, axis: int, first: int, end: int) -> Deferred:
    box = list(whole_box(tensor.shape))
    box[axis] = (first, end)
    return Deferred(Part(tensor.recipe, tuple(box)), tensor.device)


def _slice(
    tensor: Deferred, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    if step != 1:
        return _computed(_ATEN.slice.Tensor, (tensor, dim, start, end, step), {})
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    return _boxed(tensor, dim, first, max(first, last))


def _split(tensor: Deferred, size: int, dim: int = 0) -> list[Deferred]:
    length = tensor.shape[dim]
    return [
        _boxed(tensor, dim, first, min(first + size, length))
        for first in range(0, max(length, 1), max(size, 1))
    ]


def _split_sizes(tensor: Deferred, sizes: list[int], dim: int = 0) -> list[Deferred]:
    found, first = [], 0
    for size in sizes:
        found.append(_boxed(tensor, dim, first, first + size))
        first += size
    return found


def _permute(tensor: Deferred, dims: list[int]) -> Deferred:
    order = tuple(dim % tensor.ndim for dim in dims)
    return Deferred(Permuted(tensor.recipe, order), tensor.device)


def _transpose(tensor: Deferred, one: int, other: int) -> Deferred:
    order = list(range(tensor.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute(tensor, order)


def _select(tensor: Deferred, dim: int, index: int) -> Deferred:
    dim, index = dim % tensor.ndim, index % tensor.shape[dim]
    part = _boxed(tensor, dim, index, index + 1)
    return Deferred(recipes.Squeezed(part.recipe, dim), tensor.device)


def _unsqueeze(tensor: Deferred, dim: int) -> Deferred:
    return Deferred(recipes.Unsqueezed(tensor.recipe, dim % (tensor.ndim + 1)), tensor.device)


def _squeeze(tensor: Deferred) -> Deferred:
    recipe = tensor.recipe
    for axis in reversed(range(tensor.ndim)):
        if tensor.shape[axis] == 1:
            recipe = recipes.Squeezed(recipe, axis)
    return Deferred(recipe, tensor.device)


def _cat(tensors: list[Tensor], dim: int = 0) -> Any:
    if not _alike(tensors):
        return _computed(_ATEN.cat.default, (tensors, dim), {})
    parts = tuple(each.recipe for each in tensors if isinstance(each, Deferred))
    return Deferred(Joined(parts, dim % tensors[0].ndim), tensors[0].device)


def _stack(tensors: list[Tensor], dim: int = 0) -> Any:
    if not _alike(tensors):
        return _computed(_ATEN.stack.default, (tensors, dim), {})
    axis = dim % (tensors[0].ndim + 1)
    parts = tuple(
        recipes.Unsqueezed(each.recipe, axis) for each in tensors if isinstance(each, Deferred)
    )
    return Deferred(Joined(parts, axis), tensors[0].device)


def _alike(tensors: list[Tensor]) -> bool:
    """Return whether all are deferred, of one dtype and number of axes, as `Joined` needs them."""
    return len({(each.dtype, each.ndim) for each in tensors}) == 1 and all(
        isinstance(each, Deferred) for each in tensors
    )


_VIEWS: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _same,
    _ATEN.alias.default: _same,
    _ATEN.clone.default: _same,
    _ATEN._to_copy.default: _to_copy,
    _ATEN.slice.Tensor: _slice,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split_sizes,
    _ATEN.permute.default: _permute,
    _ATEN.transpose.int: _transpose,
    _ATEN.select.int: _select,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.squeeze.default: _squeeze,
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
}
_MAKERS = frozenset(
    {
        _ATEN.new_zeros.default,
        _ATEN.new_ones.default,
        _ATEN.new_empty.default,
        _ATEN.new_full.default,
        _ATEN.empty_like.default,
        _ATEN.zeros_like.default,
        _ATEN.ones_like.default,
    }
)


def realize(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the tensor with its values; one that has them is returned as it is."""
    if not isinstance(tensor, Deferred):
        return tensor
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device=device or tensor.device)
    return out.copy_(tensor.detach())


def fill(
    parameter: nn.Parameter, dtype: torch.dtype, device: torch.device, *, read: bool = True
) -> None:
    """Give a deferred parameter memory, and its values converted to `dtype`. It stays the object
    that it is, so modules and optimizers that have it need not know.

    Args:
        read: False: leave the memory as it is, because another rank will send the values.
    """
    assert isinstance(parameter, Deferred)
    if device.type == "cpu":
        values = passing(parameter.shape, dtype)
    else:
        values = torch.empty(parameter.shape, dtype=dtype, device=device)
    if read:
        parameter.recipe.cast(dtype).read(whole_box(values.shape), values)
    filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, filled)


def move(model: nn.Module, device: torch.device) -> None:
    """Let the deferred tensors of a model be on a device: they are read to there. Ties are kept."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if not isinstance(tensor, Deferred) or tensor.device == device:
                continue
            if id(tensor) not in moved:
                there = Deferred(tensor.recipe, device)
                moved[id(tensor)] = (
                    nn.Parameter(there, requires_grad=tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else there
                )
            setattr(module, name, moved[id(tensor)])


def read_all(model: nn.Module) -> None:
    """Give all deferred parameters of a model their values, where they are. Ties are kept."""
    for parameter in model.parameters():
        if isinstance(parameter, Deferred):
            fill(parameter, parameter.dtype, parameter.device)


def realize_buffers(model: nn.Module) -> None:
    """Read the buffers that are in the checkpoint; every rank has all of a buffer."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Deferred):
                module._buffers[name] = realize(buffer)
