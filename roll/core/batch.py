"""`Batch`: samples along axis B, with the axes of every tensor declared on its field.

Generic code (split, concat, select) reads the declared axes. Every tensor is a field of a class,
not the value of a string key: a type checker finds a misspelled name, and a reader of the class
sees all tensors that exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from roll.core.pickling import Columns

NUMPY_TYPES = frozenset({torch.int64, torch.int32, torch.float32, torch.float64, torch.bool})
"""Types of tensors that are sent as numpy arrays. numpy has no bfloat16."""


def tensor(axes: str, *, pad: float = 0, required: bool = False) -> Any:
    """Declare a tensor field and its axes: B = sample, T = token, R = reward.

    When parts are joined, only the length of axis T may differ between them.

    Args:
        axes: one letter per dimension, beginning with B.
        pad: value that fills axis T of the shorter parts when parts are joined.
        required: the field must be set from the start; otherwise it is None until a step sets it.
    """
    meta = {"axes": axes, "pad": pad}
    return field(metadata=meta) if required else field(default=None, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples along axis B. A subclass declares its tensors with `tensor(...)`; a field declared
    otherwise is a list with one item per sample."""

    unit: ClassVar[int] = 1
    """Number of consecutive rows that belong together, such as 2 for pairs. `split` keeps them in
    the same part."""
    row_lengths: ClassVar[str | None] = None
    """Name of the field with the number of positions of each row along axis T that are no padding;
    None if all are to be kept. Padding is not sent to other processes."""

    def __len__(self) -> int:
        first = getattr(self, fields(self)[0].name)
        return len(first)

    def __post_init__(self) -> None:
        """Check the fields; ValueError if one has another number of samples than the first field,
        or a tensor another number of axes than declared."""
        size = len(self)
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None:
                continue
            axes = spec.metadata.get("axes")
            if len(value) != size or (axes and value.dim() != len(axes)):
                shape = tuple(value.shape) if axes else len(value)
                raise ValueError(
                    f"{type(self).__name__}.{spec.name} has shape {shape}; expected axes "
                    f"{axes or 'B'} with B = {size}"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle send tensors without padding, as numpy arrays.

        Ray writes arrays into its object store with one copy, and tensors eight times as slowly,
        with all of the memory that they are a part of. At the receiver, padding has the declared
        value (except in types that numpy does not know). The module `copy` takes this way, too.
        """
        lengths = None if self.row_lengths is None else getattr(self, self.row_lengths).tolist()
        columns = {
            spec.name: _packed(getattr(self, spec.name), lengths if "T" in _axes(spec) else None)
            for spec in fields(self)
        }
        return _unpacked, (type(self), columns)

    def select(self, index: Sequence[int] | Tensor) -> Self:
        """Return the rows with the numbers `index`, in that order; a number may be repeated."""
        rows = torch.as_tensor(index, dtype=torch.long)
        positions = rows.tolist()

        def take(spec: Field[Any], value: Any) -> Any:
            return value[rows.to(value.device)] if _axes(spec) else [value[i] for i in positions]

        return self._map(take)

    def split(self, parts: int) -> list[Self]:
        """Cut the batch into `parts` consecutive parts of equal size, which share its memory: who
        gets a part must not write into it.

        Raises:
            ValueError: the number of rows is no multiple of `unit`, or the number of units is no
                multiple of `parts`.
        """
        units, unit = len(self) // self.unit, self.unit
        size, rest = divmod(units, parts)
        if rest or len(self) % unit:
            what = "samples" if unit == 1 else f"units of {unit} samples"
            raise ValueError(
                f"{units} {what} do not divide into {parts} equal parts; "
                f"{units - rest} or {units - rest + parts} do"
            )
        size *= unit
        return [self._slice(i * size, (i + 1) * size) for i in range(parts)]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join the rows of all parts, in order. Pad axis T of each field to its longest part, with
        the field's own pad value.

        Raises:
            ValueError: there are no parts, or a field is set in some parts and missing in others.
        """
        if not parts:
            raise ValueError(f"{cls.__name__}.concat needs at least one part")
        columns: dict[str, Any] = {}
        for spec in fields(cls):
            values = [getattr(part, spec.name) for part in parts]
            missing = sum(value is None for value in values)
            if missing == len(values):
                columns[spec.name] = None
            elif missing:
                raise ValueError(
                    f"{cls.__name__}.{spec.name} is missing in {missing} of {len(values)} parts"
                )
            elif _axes(spec):
                columns[spec.name] = _concat_tensors(spec, values)
            else:
                columns[spec.name] = [item for value in values for item in value]
        return cls(**columns)

    def trim(self, length: int) -> Self:
        """Return the batch with axis T of every tensor cut to `length`. The caller makes sure that
        the rest is padding."""

        def cut(spec: Field[Any], value: Any) -> Any:
            return value[:, :length] if "T" in _axes(spec) else value

        return self._map(cut)

    def to(self, device: torch.device | str) -> Self:
        """Return the same batch with every tensor on `device`."""
        return self._map(lambda spec, value: value.to(device) if _axes(spec) else value)

    def require(self, name: str, *, made_by: str) -> Tensor:
        """Return the tensor of the field `name`.

        Args:
            made_by: name of the step that sets the field; the error names it.

        Raises:
            ValueError: the field is not set.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"{type(self).__name__}.{name} is not set; run {made_by} first")
        assert isinstance(value, Tensor)
        return value

    def _slice(self, begin: int, end: int) -> Self:
        """Return the rows `begin` to `end` - 1, without a copy of the tensors."""
        return self._map(lambda spec, value: value[begin:end])

    def _map(self, change: Any) -> Self:
        """Return the batch with `change(declaration, value)` as the value of each field that is
        set; a declaration is a `dataclasses.Field`."""
        columns = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            columns[spec.name] = None if value is None else change(spec, value)
        return replace(self, **columns)


def _packed(value: Any, lengths: Sequence[int] | None) -> Any:
    """Return a tensor as a numpy array, and a list by its columns.

    Args:
        value: value of a field.
        lengths: number of positions of each row to keep, if the value has an axis T with padding.
            The result is then `[N]`: the kept positions of all rows, one row after the other. A
            tensor that numpy does not know is only cut to the longest row, and keeps its padding.
    """
    if isinstance(value, list):
        return Columns(value)
    if not isinstance(value, Tensor):
        return value
    longest = 0 if lengths is None else max(lengths, default=0)
    if lengths is not None and longest > value.shape[1]:
        raise ValueError(f"a row has {longest} positions, axis T only {value.shape[1]}")
    if value.device.type != "cpu" or value.dtype not in NUMPY_TYPES:
        return value if lengths is None else value[:, :longest].clone()
    values = value.detach().numpy()
    if lengths is None:
        return values
    kept = [row[:length] for row, length in zip(values, lengths, strict=True)]
    return np.concatenate(kept) if kept else values.reshape(0, *values.shape[2:])


def _unpacked(kind: type[Batch], columns: dict[str, Any]) -> Batch:
    """Rebuild a batch of the class `kind` from what `_packed` made of its columns, by name of the
    field."""
    lengths = columns[kind.row_lengths].tolist() if kind.row_lengths else None
    for spec in fields(kind):
        value = columns[spec.name]
        if not isinstance(value, np.ndarray):
            continue
        if lengths is not None and "T" in _axes(spec):
            value = _padded(value, lengths, spec.metadata["pad"])
        elif not value.flags.writeable:  # it is in Ray's object store, which processes share
            value = value.copy()
        columns[spec.name] = torch.from_numpy(value)
    return kind(**columns)


def _padded(values: Any, lengths: Sequence[int], fill: float) -> Any:
    """Return the rows `[B, T]` whose values `[N]` come one after the other, padded with `fill`."""
    shape = len(lengths), max(lengths, default=0), *values.shape[1:]
    rows = np.full(shape, fill, dtype=values.dtype)
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = values[start : start + length]
        start += length
    return rows


def _axes(spec: Field[Any]) -> str:
    """Return the declared axes of a tensor field; an empty text for a list."""
    axes = spec.metadata.get("axes", "")
    assert isinstance(axes, str)
    return axes


def _concat_tensors(spec: Field[Any], values: list[Tensor]) -> Tensor:
    """Concatenate tensors along their first axis, padded to the longest if the field has an axis
    T."""
    axis = _axes(spec).find("T")
    if axis >= 0:
        length = max(value.shape[axis] for value in values)
        after = len(_axes(spec)) - 1 - axis
        fill = spec.metadata["pad"]
        values = [pad(v, [0, 0] * after + [0, length - v.shape[axis]], value=fill) for v in values]
    return torch.cat(values)
