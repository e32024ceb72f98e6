"""`Manifest`: what a push will carry, sent ahead so that a receiver can refuse it unharmed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.core.errors import WeightSyncError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """One tensor of a push."""

    name: str
    """Hugging Face name."""
    shape: tuple[int, ...]
    dtype: str
    """Torch's name without the `torch.`, for example `bfloat16`."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """Names, shapes and dtypes of all tensors of a push, in the order they are sent.

    Raises:
        WeightSyncError: a name appears twice, or a dtype cannot be sent.
    """

    tensors: tuple[TensorMeta, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for meta in self.tensors:
            if meta.name in seen:
                raise WeightSyncError(f"tensor {meta.name!r} is announced twice; send each once")
            if meta.dtype not in _DTYPES:
                raise WeightSyncError(
                    f"tensor {meta.name!r} has dtype {meta.dtype}; one of {sorted(_DTYPES)} "
                    "can be sent"
                )
            seen.add(meta.name)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """From tensors of any device, meta included; reads no values."""
        return cls(tuple(meta_of(name, tensor) for name, tensor in tensors))

    @property
    def num_bytes(self) -> int:
        return sum(meta.num_bytes for meta in self.tensors)

    def to_json(self) -> list[Any]:
        return [[meta.name, list(meta.shape), meta.dtype] for meta in self.tensors]

    @classmethod
    def from_json(cls, rows: Sequence[Any]) -> Manifest:
        return cls(tuple(TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in rows))


def meta_of(name: str, tensor: Tensor) -> TensorMeta:
    return TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def check_shapes(
    manifest: Manifest, expected: Mapping[str, tuple[int, ...]], *, optional: frozenset[str]
) -> None:
    """Refuse a push that does not fit the model `expected`.

    Args:
        expected: shape of every tensor the engine's checkpoint has.
        optional: names that may come or stay away, such as a head tied to the embedding.

    Raises:
        WeightSyncError: names what is missing, unknown or of another shape.
    """
    given = {meta.name: meta.shape for meta in manifest.tensors}
    problems = []
    if missing := sorted(expected.keys() - given.keys() - optional):
        problems.append(f"{len(missing)} tensors are missing, e.g. {missing[0]!r}")
    if unknown := sorted(given.keys() - expected.keys() - optional):
        problems.append(f"{len(unknown)} tensors are unknown, e.g. {unknown[0]!r}")
    problems += [
        f"{name!r} has shape {list(given[name])}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in given and given[name] != shape
    ][:3]
    if problems:
        raise WeightSyncError(
            "the pushed weights do not fit the engine's model: "
            + "; ".join(problems)
            + "; trainer and engine must start from the same checkpoint"
        )
