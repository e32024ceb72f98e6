"""safetensors files at the level of bytes: headers read, headers written, tensors mapped.

The format is eight bytes with the length of a header, the header as JSON, then the tensors without
gaps. With headers alone it is known what every file of a conversion will hold and where, so that
tensors can be written in any order and by any process.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from mcore_adapter.convert.arrays import DTYPES, Bits
from mcore_adapter.convert.joined_arrays import Joined
from mcore_adapter.convert.storage.json_file import parse_once
from mcore_adapter.errors import ConversionError

_LIBC = ctypes.CDLL(None)
_LONGEST_HEADER = 100_000_000
_MOST_DIMENSIONS = 32
_WRITE_BYTES = 128 << 10
"""Of one call, as `cp` has it. Linux keeps what a call writes in one block of memory where it can,
and large blocks are so hard to find that writing took several times as long with 1 MiB."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a header says of a tensor, but for its place."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor, or leading part of one, at a place in a file."""

    path: Path
    offset: int
    spec: Spec

    def part(self, index: int) -> Piece:
        """One of those that lie behind each other in the first dimension.

        Raises:
            ConversionError: there are fewer.
        """
        if not self.spec.shape or not 0 <= index < self.spec.shape[0]:
            raise ConversionError(
                f"{self.path}: a tensor of shape {list(self.spec.shape)} has no part {index}"
            )
        spec = Spec(self.spec.dtype, self.spec.shape[1:])
        return Piece(self.path, self.offset + index * spec.num_bytes, spec)


def read_header(path: Path) -> dict[str, Piece]:
    """Where each tensor of a file lies.

    Raises:
        ConversionError: the file is not whole, or not a safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = parse_once(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        header.pop("__metadata__", None)
        found = {name: _piece(path, 8 + length, name, entry) for name, entry in header.items()}
    except (ValueError, struct.error) as error:
        raise ConversionError(f"{path} is no safetensors file, or corrupt: {error}") from error
    end = 8 + length
    for name, piece in sorted(found.items(), key=lambda item: (item[1].offset, item[1].spec.shape)):
        if piece.spec.num_bytes and piece.offset != end:
            raise ConversionError(f"{path} is corrupt: {name} does not begin where the last ends")
        end += piece.spec.num_bytes
    if end != size:
        raise ConversionError(
            f"{path} is truncated or corrupt: its header promises {end} bytes, it has {size}; "
            "fetch or write it again"
        )
    return found


def _piece(path: Path, base: int, name: str, entry: object) -> Piece:
    """
    Raises:
        ValueError: the entry is not one of a header.
    """
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError(f"{name} has no dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} is of the unknown type {dtype}")
    offsets = _counts(name, entry["data_offsets"])
    spec = Spec(dtype, tuple(_counts(name, entry["shape"])))
    if len(offsets) != 2 or offsets[1] - offsets[0] != spec.num_bytes:
        raise ValueError(f"{name} lies at {offsets}, which does not fit {dtype} {list(spec.shape)}")
    return Piece(path, base + offsets[0], spec)


def _counts(name: str, found: object) -> list[int]:
    whole = isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)
    if not isinstance(found, list) or not whole or len(found) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {str(found)[:60]}, expected whole numbers")
    return found


def make_header(specs: Mapping[str, Spec], path: Path) -> tuple[bytes, dict[str, Piece]]:
    """The beginning of a file with these tensors, and where each will lie.

    Wide types come first, as safetensors itself orders them, so that all are aligned.
    """
    order = sorted(specs, key=lambda name: -DTYPES[specs[name].dtype].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        spec = specs[name]
        end = at + spec.num_bytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces, at = {}, 8 + len(text)
    for name in order:
        pieces[name] = Piece(path, at, specs[name])
        at += specs[name].num_bytes
    return struct.pack("<Q", len(text)) + text, pieces


class Reader:
    """Maps files; the pages of a tensor are given back once it is converted."""

    def __init__(self) -> None:
        self._maps: dict[Path, _Mapped] = {}

    def read(self, piece: Piece) -> Bits:
        """A view, valid as long as the reader."""
        dtype, shape = DTYPES[piece.spec.dtype], piece.spec.shape
        if piece.spec.num_bytes == 0:
            return np.empty(shape, dtype)
        if piece.path not in self._maps:
            self._maps[piece.path] = _Mapped.of(piece.path)
        pages = self._maps[piece.path].pages
        if piece.offset + piece.spec.num_bytes > len(pages):
            raise ConversionError(f"{piece.path} became shorter while it was converted")
        return np.frombuffer(pages, dtype, prod(shape), piece.offset).reshape(shape)

    def place_of(self, block: Bits) -> tuple[_Mapped, int] | None:
        """File and offset of what is a view of one, and contiguous."""
        address = block.ctypes.data
        for each in self._maps.values():
            if each.address <= address < each.address + len(each.pages):
                return each, address - each.address
        return None

    def close(self) -> None:
        """Views stay valid; what is written from them is read from their pages."""
        while self._maps:
            os.close(self._maps.popitem()[1].file)

    def release(self, pieces: Sequence[Piece]) -> None:
        """Pages that only these touch no longer count as memory of this process."""
        for piece in pieces:
            start = -(-piece.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (piece.offset + piece.spec.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                self._maps[piece.path].pages.madvise(mmap.MADV_DONTNEED, start, end - start)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A file in memory."""

    path: Path
    file: int
    pages: mmap.mmap
    address: int

    @classmethod
    def of(cls, path: Path) -> _Mapped:
        file = os.open(path, os.O_RDONLY)
        pages = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        return cls(path, file, pages, np.frombuffer(pages, np.uint8).ctypes.data)


class Writer:
    """Writes tensors at their places in files that exist."""

    def __init__(self, reader: Reader | None = None, *, write_back: bool = False) -> None:
        """
        Args:
            reader: views of its files are copied from file to file, not through their pages.
            write_back: the disk begins to write at once, so that a flush waits less.
        """
        self._files: dict[Path, int] = {}
        self._reader = reader
        self._write_back = write_back
        self._part = memoryview(bytearray(_WRITE_BYTES))

    def write(self, piece: Piece, tensor: Bits | Joined) -> None:
        file = self._files.get(piece.path)
        if file is None:
            file = self._files[piece.path] = os.open(piece.path, os.O_WRONLY)
        at = piece.offset
        for block in _blocks(tensor):
            place = self._reader.place_of(block) if self._reader is not None else None
            if place is None:
                _write_all(file, block.reshape(-1).view(np.uint8).data, at)
            else:
                _copy(*place, file, at, block.nbytes, self._part)
            at += block.nbytes
        if self._write_back:
            _write_back(file, piece)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def _blocks(tensor: Bits | Joined) -> Iterator[Bits]:
    """The tensor in order, in contiguous parts."""
    if isinstance(tensor, Joined) and (tensor.dim == 0 or len(tensor.parts) == 1):
        for part in tensor.parts:
            yield from _blocks(part)
    elif tensor.ndim < 2 or (isinstance(tensor, np.ndarray) and tensor.flags.c_contiguous):
        yield np.ascontiguousarray(tensor)
    else:
        # a few rows at a time: what is gathered is still in the cache when it is written
        row_bytes = prod(tensor.shape[1:]) * tensor.dtype.itemsize
        step = max(1, _WRITE_BYTES // max(row_bytes, 1))
        for start in range(0, tensor.shape[0], step):
            yield np.ascontiguousarray(tensor[start : start + step])


def _copy(
    source: _Mapped, start: int, file: int, offset: int, num_bytes: int, part: memoryview
) -> None:
    """Through a part that stays in the cache: faster than pages that are mapped first, and than the
    kernel's own `copy_file_range`, which takes page by page.

    Raises:
        ConversionError: the source is shorter than it was.
    """
    end = offset + num_bytes
    while offset < end:
        found = os.preadv(source.file, [part[: end - offset]], start)
        if not found:
            raise ConversionError(f"{source.path} became shorter while it was converted")
        _write_all(file, part[:found], offset)
        start, offset = start + found, offset + found


def _write_all(file: int, left: memoryview, offset: int) -> None:
    while left:
        written = os.pwrite(file, left[:_WRITE_BYTES], offset)
        offset, left = offset + written, left[written:]


_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def _write_back(file: int, piece: Piece) -> None:
    """Linux by itself writes back after seconds, and a flush at the end would then wait for all."""
    if sys.platform == "linux":
        _LIBC.sync_file_range(
            file,
            ctypes.c_int64(piece.offset),
            ctypes.c_int64(piece.spec.num_bytes),
            _SYNC_FILE_RANGE_WRITE,
        )
