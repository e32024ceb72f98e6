"""Rows that are on disk and are read one by one, by their place."""

from __future__ import annotations

import bisect
import itertools
import json
import mmap
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from roll.core.errors import DataError
from roll.data.store.making import Encoded, Maker, Tagged
from roll.data.store.tally import Tally

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

Row = TypeVar("Row", bound=Tagged)
Part = TypeVar("Part")

MAPPED_ROWS = 64
"""Number of rows after which the pages that were read are given back."""
ROWS, NUMBERS, LENGTHS, HASHES = "rows.arrow", "numbers.npy", "lengths.npy", "hashes.npy"
REPORT = "report.json"


@dataclass(frozen=True)
class StoredRows(Sequence[Row], Generic[Row]):
    """Rows of one source in a folder of the store, mapped into memory.

    A row is decoded when somebody asks for it, and belongs to the caller.
    """

    folder: Path
    """Folder with the files."""
    prefix: str
    """Beginning of the ids of the rows: `<prefix>:<number>`."""
    maker: Maker[Row]
    """Maker of the rows, which decodes them."""
    gone: frozenset[int] = frozenset()
    """Places in the files of rows that are left out."""

    @cached_property
    def _report(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / REPORT).read_text()))

    @cached_property
    def _reader(self) -> pa.RecordBatchFileReader:
        import pyarrow as pa

        return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._mapped)))

    @cached_property
    def _mapped(self) -> mmap.mmap:
        """The file with the tokens, mapped into memory."""
        with (self.folder / ROWS).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @cached_property
    def _reads(self) -> Iterator[int]:
        """Numbers of the rows that are read, from 1 on."""
        return itertools.count(1)

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        """Number of each row in its source, ascending."""
        return self._kept(self._all_numbers)

    @cached_property
    def _all_numbers(self) -> NDArray[np.int64]:
        """The same with those that are left out."""
        numbers: NDArray[np.int64] = self._array(NUMBERS)
        return numbers

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """Place in the files of each row."""
        import numpy as np

        return self._kept(np.arange(sum(self._report["batches"])))

    def _kept(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values of those rows that are not left out."""
        import numpy as np

        return np.delete(values, sorted(self.gone), axis=0) if self.gone else values

    @cached_property
    def hashes(self) -> NDArray[np.uint8]:
        """Hash of the tokens of each row, `[rows, 16]`: equal for rows that a model cannot tell
        apart."""
        return self._kept(self._all_hashes)

    @cached_property
    def _all_hashes(self) -> NDArray[np.uint8]:
        """The same with those of rows that are left out."""
        hashes: NDArray[np.uint8] = self._array(HASHES)
        return hashes

    @cached_property
    def _starts(self) -> list[int]:
        """Place of the first row of each batch of the file."""
        return list(itertools.accumulate(self._report["batches"], initial=0))[:-1]

    @cached_property
    def _batches(self) -> dict[int, pa.RecordBatch]:
        """Batches that have been asked for; they are mapped, not read."""
        return {}

    @cached_property
    def tally(self) -> Tally:
        """Counts of what became of the rows of the source."""
        lengths = array("I", self._array(LENGTHS).tobytes())
        return Tally.from_json(self._report["tally"], lengths)

    @property
    def tags(self) -> Mapping[str, int]:
        """Number of rows with each tag."""
        tags = Counter(self._report["tags"])
        tags.subtract(self._at(place).tag for place in self.gone)
        return +tags

    @property
    def digest(self) -> str:
        """Hash of the content of all rows."""
        left_out = f" without {sorted(self.gone)}" if self.gone else ""
        return f"{self._report['digest']}{left_out}"

    def open(self) -> None:
        """Open all files, so that they can be used when their folder is gone.

        Raises:
            DataError: a file is missing or broken.
        """
        try:
            opened = (self._reader, self._numbers, self.hashes, self.tally)
            sizes = {sum(self._report["batches"]), len(self._numbers), len(self.hashes)}
            if len(sizes) > 1 or opened[0].num_record_batches != len(self._report["batches"]):
                raise ValueError(f"its files have different numbers of rows: {sorted(sizes)}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.folder}: the tokenized rows cannot be read ({error}); remove this folder, "
                "and they are made again"
            ) from error

    def with_prefix(self, prefix: str) -> StoredRows[Row]:
        """Return the same rows, whose ids begin with `prefix`."""
        return self._opened(replace(self, prefix=prefix))

    def without(self, places: Iterable[int]) -> StoredRows[Row]:
        """Return these rows without those at some places."""
        gone = self.gone.union(int(self._places[place]) for place in places)
        return self._opened(replace(self, gone=gone))

    def _opened(self, copy: StoredRows[Row]) -> StoredRows[Row]:
        """Return a copy with the files that are open here: their folder may be gone."""
        vars(copy).update({name: vars(self)[name] for name in _OF_FILES if name in vars(self)})
        return copy

    def find(self, row_id: str) -> Row | None:
        """Return the row with this id; None if there is none."""
        prefix, _, number = row_id.rpartition(":")
        if prefix != self.prefix or not number.isdecimal():
            return None
        at = bisect.bisect_left(self._numbers, int(number))
        found = at < len(self) and self._numbers[at] == int(number)
        return self[at] if found else None

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        """Return the row at a place, or those of a range; IndexError if there is none."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        place = at + len(self) if at < 0 else at
        if not 0 <= place < len(self):
            raise IndexError(f"row {at} of {len(self)}")
        return self._at(int(self._places[place]))

    def _at(self, place: int) -> Row:
        """Return the row at a place of the files."""
        if next(self._reads) % MAPPED_ROWS == 0:
            # Pages that were read count as memory of this process; the kernel keeps them anyway.
            self._mapped.madvise(mmap.MADV_DONTNEED)
        # The last batch that begins here; batches before it may be empty.
        number = bisect.bisect_right(self._starts, place) - 1
        if number not in self._batches:
            self._batches[number] = self._reader.get_batch(number)
        batch, row = self._batches[number], place - self._starts[number]
        encoded = Encoded(
            [tokens.tolist() for tokens in _lists(batch.column("tokens"), row)],
            [trained.tolist() for trained in _lists(batch.column("trained"), row)],
            batch.column("more")[row].as_py(),
            tag="",
        )
        number_of_row = self._all_numbers[place]
        return self.maker.decode(f"{self.prefix}:{number_of_row}", encoded)

    def _array(self, name: str) -> Any:
        """Return an array of the folder, mapped into memory."""
        import numpy as np

        # `np.load` could unpickle; this cannot.
        return np.lib.format.open_memmap(self.folder / name, mode="r")  # type: ignore[no-untyped-call]


_OF_FILES = (
    *("_report", "_mapped", "_reader", "_batches", "_reads"),
    *("_all_numbers", "_all_hashes", "tally"),
)
"""Properties of `StoredRows` that are the same whatever rows are left out."""


def _lists(column: Any, row: int) -> Iterator[Any]:
    """Yield the lists of numbers in a row of a column of lists of lists, as arrays."""
    first, last = (column.offsets[row + i].as_py() for i in (0, 1))
    inner = column.values
    ends = inner.offsets[first : last + 1].to_numpy()
    values = inner.values
    for start, stop in itertools.pairwise(ends):
        yield values.slice(start, stop - start).to_numpy()


@dataclass(frozen=True)
class Chained(Sequence[Part], Generic[Part]):
    """Rows of several sequences, one after the other."""

    parts: Sequence[Sequence[Part]]

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, at: int) -> Part: ...
    @overload
    def __getitem__(self, at: slice) -> list[Part]: ...
    def __getitem__(self, at: int | slice) -> Part | list[Part]:
        """Return the row at a place, or those of a range; IndexError if there is none."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        place = at + len(self) if at < 0 else at
        if not 0 <= place < len(self):
            raise IndexError(f"row {at} of {len(self)}")
        part = bisect.bisect_right(self._ends, place)
        return self.parts[part][place - (self._ends[part - 1] if part else 0)]

    def __iter__(self) -> Iterator[Part]:
        return itertools.chain.from_iterable(self.parts)
