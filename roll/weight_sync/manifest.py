"""`Manifest`: list of the tensors of a push.

It is sent before the tensors, so that a receiver can refuse the push and keep its old weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
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
    """Name, shape and dtype of one tensor of a push."""

    name: str
    """Hugging Face name of the tensor; for a tensor of an adapter, its PEFT name."""
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the dtype without `torch.`, for example `bfloat16`."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """Names, shapes and dtypes of all tensors of a push, in the order they are sent.

    Raises:
        WeightSyncError: a name appears twice, a dtype cannot be sent, or the cuts do not fit the
            tensors.
    """

    tensors: tuple[TensorMeta, ...]
    cuts: tuple[tuple[int, ...], ...] = ()
    """Shares of the senders: sender `s` holds elements `cuts[i][s]` up to (not including)
    `cuts[i][s + 1]` of the flattened tensor `i`. Empty: sender 0 holds everything."""
    unchanged: frozenset[str] = frozenset()
    """Names of tensors of the model that are not sent, because they have not changed since the
    receivers got them: frozen parameters."""

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
        if both := sorted(seen & self.unchanged):
            raise WeightSyncError(f"tensor {both[0]!r} is announced both as sent and as unchanged")
        if self.cuts:
            self._check_cuts()

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
        """Make a manifest in which sender 0 holds all tensors; they may be on the meta device."""
        return cls(tuple(meta_of(name, tensor) for name, tensor in tensors))

    @property
    def num_bytes(self) -> int:
        return sum(meta.num_bytes for meta in self.tensors)

    @property
    def num_senders(self) -> int:
        return len(self.cuts[0]) - 1 if self.cuts else 1

    def cuts_of(self, tensor: int) -> tuple[int, ...]:
        """Return the cuts of a tensor: each sender's first element, then the number of elements.

        Args:
            tensor: position of the tensor in the manifest.
        """
        return self.cuts[tensor] if self.cuts else (0, self.tensors[tensor].num_elements)

    def without(self, unchanged: Iterable[str]) -> Manifest:
        """Return the same manifest with the tensors `unchanged` not sent but named as unchanged."""
        names = frozenset(unchanged)
        keep = [i for i, meta in enumerate(self.tensors) if meta.name not in names]
        return replace(
            self,
            tensors=tuple(self.tensors[i] for i in keep),
            cuts=tuple(self.cuts[i] for i in keep) if self.cuts else (),
            unchanged=self.unchanged | names,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as plain JSON, for `from_json`."""
        return {
            "tensors": [[meta.name, list(meta.shape), meta.dtype] for meta in self.tensors],
            "cuts": [list(cuts) for cuts in self.cuts],
            "unchanged": sorted(self.unchanged),
        }

    @classmethod
    def from_json(cls, note: Mapping[str, Any]) -> Manifest:
        """Make the manifest from `note`, which `to_json` returned; the errors are those of the
        class."""
        rows: Sequence[Any] = note["tensors"]
        return cls(
            tuple(TensorMeta(name, tuple(shape), dtype) for name, shape, dtype in rows),
            tuple(tuple(cuts) for cuts in note["cuts"]),
            frozenset(note["unchanged"]),
        )

    def _check_cuts(self) -> None:
        """Raise WeightSyncError unless each tensor has cuts that rise from 0 to its size."""
        if len(self.cuts) != len(self.tensors):
            raise WeightSyncError(
                f"the manifest has cuts of {len(self.cuts)} tensors, but {len(self.tensors)} "
                "tensors; give one line of cuts for each"
            )
        for meta, cuts in zip(self.tensors, self.cuts, strict=True):
            ordered = all(left <= right for left, right in pairwise(cuts))
            whole = bool(cuts) and (cuts[0], cuts[-1]) == (0, meta.num_elements)
            if not (ordered and whole and len(cuts) == len(self.cuts[0]) > 1):
                raise WeightSyncError(
                    f"tensor {meta.name!r} of {meta.num_elements} elements has the cuts "
                    f"{list(cuts)}; they must rise from 0 to its size, one more than senders"
                )


@lru_cache(maxsize=4)
def digest(manifest: Manifest) -> str:
    """Return a checksum of all that a manifest says. That of the latest ones is kept, because one
    push is as the other."""
    return hashlib.sha256(json.dumps(manifest.to_json()).encode()).hexdigest()


def meta_of(name: str, tensor: Tensor) -> TensorMeta:
    return TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def even_cuts(num_rows: int, row_elements: int, parts: int) -> tuple[int, ...]:
    """Return the cuts of a tensor whose rows (axis 0) are split as `torch.chunk` and FSDP2 do.

    Each rank gets ceil(rows / parts) rows until none are left.

    Args:
        row_elements: number of elements of a row.
        parts: number of ranks, at least one.

    Returns:
        Offsets in the flattened tensor, in elements: the first element of each rank, then the size.
    """
    step = -(-num_rows // parts)
    return tuple(min(i * step, num_rows) * row_elements for i in range(parts + 1))
