"""Large values of rows on disk, such as the cases of programming problems, which have gigabytes.

A value leaves memory when its row is read, and is read from an unnamed file when somebody asks for
it. Whoever pickles a row, to send it to a reward, gets the values themselves.
"""

from __future__ import annotations

import functools
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

LARGE_BYTES = 1 << 14
"""Values with at least so many bytes go to the file."""


def spooled(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns of a row, of which the large ones are in a file of this process.

    The file is in the folder for temporary files (`TMPDIR`), and ends with the process.
    """
    places = {}
    for name, value in values.items():
        packed = _packed(value)
        if len(packed) >= LARGE_BYTES:
            places[name] = _spool(os.getpid()).put(packed)
    if not places:
        return dict(values)
    return SpooledRow({n: v for n, v in values.items() if n not in places}, places, list(values))


class SpooledRow(Mapping[str, Any]):
    """Columns of a row; each access to a large one reads it from the file."""

    def __init__(
        self, small: Mapping[str, Any], places: Mapping[str, Place], names: list[str]
    ) -> None:
        """Keep small values and the places of large ones.

        Args:
            small: values of the columns that stay in memory.
            places: stretch of the file with the value of every other column.
            names: all columns in their order.
        """
        self._small, self._places, self._names = small, places, names

    def __getitem__(self, name: str) -> Any:
        """Return the value of a column; KeyError for an unknown one, OSError if the disk does not
        give it."""
        place = self._places.get(name)
        return self._small[name] if place is None else pickle.loads(place.read())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"SpooledRow({self._small!r}, in a file: {sorted(self._places)})"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the row as a dict with all its values."""
        return dict, (dict(self),)


def put_bytes(data: bytes) -> Place:
    """Put bytes into the file of this process and return their place; OSError as in `Spool.put`."""
    return _spool(os.getpid()).put(data)


class Place:
    """A stretch of a spool. Pickled, it can be read in all processes of its user on this machine,
    as long as the process lives that has pickled it."""

    __slots__ = ("_length", "_spool", "_start")

    def __init__(self, spool: Spool | ForeignSpool, start: int, length: int) -> None:
        """Describe the stretch of `length` bytes from byte `start` of the spool on."""
        self._spool, self._start, self._length = spool, start, length

    def read(self) -> bytes:
        """Return the bytes of this stretch.

        Raises:
            OSError: the disk does not give them, or the process with the file has ended.
        """
        return self._spool.read(self._start, self._length)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Place, (ForeignSpool(self._spool.path), self._start, self._length)


@dataclass(frozen=True, slots=True)
class ForeignSpool:
    """The spool of another process."""

    path: str
    """Name of the file as an open file of that process."""

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes of the file, from byte `start` on; OSError as in `Spool.read`."""
        with open(self.path, "rb") as file:
            return _read(file.fileno(), start, length)


class Spool:
    """An unnamed file to which values are appended."""

    def __init__(self) -> None:
        """Make the file, in the folder for temporary files."""
        self._file: BinaryIO = tempfile.TemporaryFile(prefix="roll_rows_")  # noqa: SIM115
        self._end, self._lock = 0, threading.Lock()

    def put(self, data: bytes) -> Place:
        """Append bytes and return their place.

        Raises:
            OSError: the disk is full; the message names the folder.
        """
        with self._lock:
            start, view = self._end, memoryview(data)
            try:
                while view:
                    written = os.pwrite(self._file.fileno(), view, self._end)
                    self._end += written
                    view = view[written:]
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"large columns of the data do not fit into {tempfile.gettempdir()} "
                    f"({error.strerror}); name a folder with more room in TMPDIR",
                ) from error
            return Place(self, start, len(data))

    @property
    def path(self) -> str:
        """Name of the file for other processes; it has none in a folder."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes of the file, from byte `start` on; OSError if it ends before."""
        return _read(self._file.fileno(), start, length)


def _read(file: int, start: int, length: int) -> bytes:
    """Return `length` bytes of an open file, from byte `start` on; OSError if it ends before."""
    data = os.pread(file, length, start)
    while len(data) < length:  # a call gives 2 GiB at most
        more = os.pread(file, length - len(data), start + len(data))
        if not more:
            raise OSError(f"a spool of rows ends after {start + len(data)} bytes")
        data += more
    return data


@functools.cache
def _spool(pid: int) -> Spool:
    """Return the spool of the process `pid`, which must be this one; a fork that reads rows makes
    its own."""
    return Spool()


def _packed(value: Any) -> bytes:
    """Return a value as pickled bytes; no bytes if it is small for sure."""
    if value is None or isinstance(value, bool | int | float):
        return b""
    if isinstance(value, str | bytes) and len(value) * 4 < LARGE_BYTES:
        return b""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
