"""The tensors in the safetensors files of a checkpoint, read in parts and without mapping files.

A mapped file would do, too, but its pages count as memory of the process until the kernel takes
them back, and on a network's file system each page is a request.
"""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from roll.models.deferred.recipes import Box

BUFFER_BYTES = 2**22
"""Bytes that are read at once; a reader needs them beside the memory of the result."""
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Names of dtypes in safetensors files -> dtypes."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Recipe of a tensor in a file: its elements in row-major order."""

    file: OpenFile
    begin: int
    """Offset of its first byte in the file."""
    shape: torch.Size
    stored_as: torch.dtype
    casts: tuple[torch.dtype, ...] = ()
    """Dtypes to which its values are converted, one after the other."""

    @property
    def dtype(self) -> torch.dtype:
        return self.casts[-1] if self.casts else self.stored_as

    def cast(self, dtype: torch.dtype) -> Stored:
        return self if dtype == self.dtype else replace(self, casts=(*self.casts, dtype))

    def read(self, box: Box, out: Tensor) -> None:
        assert out.dtype == self.dtype, "the copy into the result is the last conversion"
        if out.numel():
            self._read_rows(self.begin, self.shape, box, out)

    def _read_rows(self, begin: int, shape: torch.Size, box: Box, out: Tensor) -> None:
        """Read a box of the array of `shape` at `begin`, as many whole rows at once as fit."""
        if not shape:
            out.copy_(self._values(begin, shape))
            return
        row = shape[1:].numel()
        row_bytes = row * self.stored_as.itemsize
        first, end = box[0]
        if row_bytes > BUFFER_BYTES and len(shape) > 1:
            for i in range(first, end):
                self._read_rows(begin + i * row_bytes, shape[1:], box[1:], out[i - first])
            return
        step = max(1, BUFFER_BYTES // max(1, row_bytes))
        inner = tuple(slice(*each) for each in box[1:])
        for i in range(first, end, step):
            rows = min(step, end - i)
            values = self._values(begin + i * row_bytes, torch.Size((rows, *shape[1:])))
            out[i - first : i - first + rows].copy_(values[(slice(None), *inner)])

    def _values(self, begin: int, shape: torch.Size) -> Tensor:
        """Return the array of `shape` at `begin`, before the last conversion."""
        values = self.file.read(begin, shape.numel() * self.stored_as.itemsize)
        values = values.view(self.stored_as).view(shape)
        for dtype in self.casts[:-1]:
            values = values.to(dtype)
        return values


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that stays open as long as a tensor of it may be read."""

    path: Path
    _descriptor: _Descriptor = field(repr=False)

    @classmethod
    def of(cls, path: Path) -> OpenFile:
        """Open a file for reading."""
        return cls(path, _Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC)))

    def read(self, begin: int, count: int) -> Tensor:
        """Return `count` bytes of the file, uint8.

        Raises:
            OSError: the file has become shorter, or cannot be read.
        """
        buffer = _pages(count)
        view, done = memoryview(buffer), 0
        while done < count:
            got = os.preadv(self._descriptor.number, [view[done:]], begin + done)
            if got == 0:
                raise OSError(f"{self.path} ended {count - done} bytes before its tensors")
            done += got
        return torch.frombuffer(buffer, dtype=torch.uint8)


def passing(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return memory for a tensor on the CPU that is freed soon, while smaller ones stay."""
    count = shape.numel() * dtype.itemsize
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_pages(count), dtype=dtype).view(shape)


def _pages(count: int) -> mmap.mmap:
    """Return memory that the system gets back as soon as it is freed. A buffer of malloc among
    smaller tensors that stay would leave gaps, in sum as large as the model."""
    return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _Descriptor:
    """Number of an open file, closed with the last reference."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


def stored_tensors(files: list[Path]) -> dict[str, Stored] | None:
    """Return the tensors of safetensors files by name; None if one has a dtype that is not known.

    Raises:
        OSError: a file is missing.
        SafetensorError: a file is damaged.
    """
    found: dict[str, Stored] = {}
    for path in files:
        with safe_open(path, framework="pt"):
            pass  # checks header and size
        file = OpenFile.of(path)
        length = int.from_bytes(file.read(0, 8).numpy().tobytes(), "little")
        header = json.loads(file.read(8, length).numpy().tobytes())
        for name, known in header.items():
            if name == "__metadata__":
                continue
            if known["dtype"] not in DTYPES:
                return None
            shape = torch.Size(known["shape"])
            begin = 8 + length + known["data_offsets"][0]
            found[name] = Stored(file, begin, shape, DTYPES[known["dtype"]])
    return found


def weight_files(folder: Path) -> list[Path] | None:
    """List the safetensors files from which transformers loads a folder; None: it has others."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return None
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(names))]
