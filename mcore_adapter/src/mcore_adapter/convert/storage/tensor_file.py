"""safetensors files at the level of bytes: headers and tensors, each read and written.

The format is eight bytes with the length of the header, then the header as JSON, then the tensors
without gaps. The headers alone give the content of each file of a conversion and the place of each
tensor, so that tensors can be written in any order and by any process.
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
"""Bytes of one write call, the same number as in `cp`. If possible, Linux caches the data of one
call in one block of memory. Large blocks are so hard to find that writing took several times as
long with 1 MiB."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Data type and shape of a tensor, as in the header of a file."""

    dtype: str
    """Safetensors name of the type, such as `BF16`."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """Place of a tensor in a file, or of one entry along the first dimension of a tensor."""

    path: Path
    offset: int
    """Position of the first byte in the file."""
    spec: Spec

    def part(self, index: int) -> Piece:
        """Return the place of the entry `index` along the first dimension.

        Raises:
            ConversionError: the tensor has no such entry.
        """
        if not self.spec.shape or not 0 <= index < self.spec.shape[0]:
            raise ConversionError(
                f"{self.path}: a tensor of shape {list(self.spec.shape)} has no part {index}"
            )
        spec = Spec(self.spec.dtype, self.spec.shape[1:])
        return Piece(self.path, self.offset + index * spec.num_bytes, spec)


def read_header(path: Path) -> dict[str, Piece]:
    """Read the place of each tensor of a file, by name.

    Raises:
        ConversionError: the file is truncated, corrupt, or no safetensors file.
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
    """Return the place of a tensor.

    Args:
        path: path of the file.
        base: position of the first tensor in the file, in bytes.
        name: name of the tensor.
        entry: JSON value of the tensor in the header.

    Raises:
        ValueError: the entry does not have the form of the format.
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
    """Return a shape or a pair of offsets of the tensor `name`, once it is known to be one.

    Raises:
        ValueError: it is no list of whole numbers from 0 on, or the list is too long.
    """
    whole = isinstance(found, list) and all(type(n) is int and n >= 0 for n in found)
    if not isinstance(found, list) or not whole or len(found) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {str(found)[:60]}, expected whole numbers")
    return found


def make_header(specs: Mapping[str, Spec], path: Path) -> tuple[bytes, dict[str, Piece]]:
    """Return the header of a file as bytes, and the place of each tensor by name.

    As in the safetensors library, wide data types come first, so that every tensor is aligned.
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
    """Reader of tensors from memory-mapped files. Each file is mapped when it is first read."""

    def __init__(self) -> None:
        self._maps: dict[Path, _Mapped] = {}

    def read(self, piece: Piece) -> Bits:
        """Return the bits of a tensor as a read-only view of the mapped file.

        Raises:
            ConversionError: the file is too short.
        """
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
        """Return the mapped file, and the byte offset in it, of which a contiguous block is a view.

        None: the block is a view of no mapped file.
        """
        address = block.ctypes.data
        for each in self._maps.values():
            if each.address <= address < each.address + len(each.pages):
                return each, address - each.address
        return None

    def close(self) -> None:
        """Close all files. Views stay valid, but a `Writer` then copies them from memory."""
        while self._maps:
            os.close(self._maps.popitem()[1].file)

    def release(self, pieces: Sequence[Piece]) -> None:
        """Give back the memory pages that lie entirely within these tensors.

        The pages no longer count as memory of this process, and are loaded again on the next use.
        The files must be open: a tensor of each has been read.
        """
        for piece in pieces:
            start = -(-piece.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (piece.offset + piece.spec.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > start:
                self._maps[piece.path].pages.madvise(mmap.MADV_DONTNEED, start, end - start)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """Memory-mapped file."""

    path: Path
    file: int
    """File descriptor."""
    pages: mmap.mmap
    address: int
    """Memory address of the first byte."""

    @classmethod
    def of(cls, path: Path) -> _Mapped:
        """Map a file into memory."""
        file = os.open(path, os.O_RDONLY)
        pages = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        return cls(path, file, pages, np.frombuffer(pages, np.uint8).ctypes.data)


class Writer:
    """Writer of tensors at their places in files that already exist."""

    def __init__(self, reader: Reader | None = None, *, write_back: bool = False) -> None:
        """
        Args:
            reader: reader of the tensors. Views of its files are copied from file to file, which is
                faster than copying from mapped memory.
            write_back: start writing to the disk at once, so that a later flush takes less time.
        """
        self._files: dict[Path, int] = {}
        self._reader = reader
        self._write_back = write_back
        self._part = memoryview(bytearray(_WRITE_BYTES))

    def write(self, piece: Piece, tensor: Bits | Joined) -> None:
        """Write a tensor at its place in a file.

        Its type and size must be those of `piece`, which is not checked.
        """
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
        """Close all files."""
        while self._files:
            os.close(self._files.popitem()[1])


def _blocks(tensor: Bits | Joined) -> Iterator[Bits]:
    """Yield the tensor as contiguous blocks, in order."""
    if isinstance(tensor, Joined) and (tensor.dim == 0 or len(tensor.parts) == 1):
        for part in tensor.parts:
            yield from _blocks(part)
    elif tensor.ndim < 2 or (isinstance(tensor, np.ndarray) and tensor.flags.c_contiguous):
        yield np.ascontiguousarray(tensor)
    else:
        # a few rows at a time, so that the copied rows are still in the CPU cache when written
        row_bytes = prod(tensor.shape[1:]) * tensor.dtype.itemsize
        step = max(1, _WRITE_BYTES // max(row_bytes, 1))
        for start in range(0, tensor.shape[0], step):
            yield np.ascontiguousarray(tensor[start : start + step])


def _copy(
    source: _Mapped, start: int, file: int, offset: int, num_bytes: int, part: memoryview
) -> None:
    """Copy bytes from one file to another through a buffer that stays in the CPU cache.

    This is faster than writing from mapped pages, which must be mapped first, and faster than the
    system call `copy_file_range`, which copies page by page.

    Args:
        source: file to read.
        start: position in the source, in bytes.
        file: descriptor of the file to write.
        offset: position in the file to write, in bytes.
        num_bytes: number of bytes to copy.
        part: buffer.

    Raises:
        ConversionError: the source became shorter.
    """
    end = offset + num_bytes
    while offset < end:
        found = os.preadv(source.file, [part[: end - offset]], start)
        if not found:
            raise ConversionError(f"{source.path} became shorter while it was converted")
        _write_all(file, part[:found], offset)
        start, offset = start + found, offset + found


def _write_all(file: int, left: memoryview, offset: int) -> None:
    """Write all bytes to the open file from `offset` on, in as many calls as it takes."""
    while left:
        written = os.pwrite(file, left[:_WRITE_BYTES], offset)
        offset, left = offset + written, left[written:]


_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def _write_back(file: int, piece: Piece) -> None:
    """Make Linux start writing a tensor to the disk at once.

    By default Linux starts after some seconds, and a flush at the end would wait for all the data.
    On other systems this function does nothing.
    """
    if sys.platform == "linux":
        _LIBC.sync_file_range(
            file,
            ctypes.c_int64(piece.offset),
            ctypes.c_int64(piece.spec.num_bytes),
            _SYNC_FILE_RANGE_WRITE,
        )
