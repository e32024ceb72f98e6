"""Arrays that are nowhere put together, beside those that are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_adapter.convert.arrays import cut, join
from mcore_adapter.convert.joined_arrays import Joined
from mcore_adapter.convert.storage.tensor_file import Piece, Reader, Spec, Writer
from mcore_adapter.errors import ConversionError


@st.composite
def arrays(draw: st.DrawFn) -> tuple[Joined, np.ndarray[Any, Any]]:
    """Some parts, and what they are together."""
    dim = draw(st.integers(0, 1))
    rest = draw(st.sampled_from([2, 4, 6]))
    parts, at = [], 0
    for length in draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3)):
        size = length * rest
        part = np.arange(at, at + size, dtype=np.uint16)
        parts.append(part.reshape((length, rest) if dim == 0 else (rest, length)))
        at += size
    return Joined(tuple(parts), dim), np.concatenate(parts, axis=dim)


@given(arrays(), st.data())
@settings(max_examples=300)
def test_whatever_operators_do_gives_what_it_gives_of_the_whole(
    both: tuple[Joined, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    lazy, whole = both
    for _ in range(3):
        kind = data.draw(st.sampled_from(["cut", "swap", "group", "flat", "stride"]))
        dim = data.draw(st.integers(0, whole.ndim - 1))
        if kind == "cut":
            first = data.draw(st.integers(0, whole.shape[dim]))
            lengths = [first, whole.shape[dim] - first]
            order = data.draw(st.permutations([0, 1]))
            pieces, expected = cut(lazy, lengths, dim), np.split(whole, [first], axis=dim)
            lazy = join([pieces[i] for i in order], dim)
            whole = np.concatenate([expected[i] for i in order], axis=dim)
        elif kind == "swap" and whole.ndim > 1:
            lazy, whole = lazy.swapaxes(0, 1), whole.swapaxes(0, 1)
        elif kind == "group" and len(whole) % 2 == 0:
            lazy = lazy.reshape(2, -1, *lazy.shape[1:])
            whole = whole.reshape(2, -1, *whole.shape[1:])
        elif kind == "flat" and whole.ndim > 2:
            lazy = lazy.reshape(-1, *lazy.shape[2:])
            whole = whole.reshape(-1, *whole.shape[2:])
        elif kind == "stride":
            lazy, whole = lazy[::2], whole[::2]
        assert lazy.shape == whole.shape
        np.testing.assert_array_equal(np.asarray(lazy), whole)


@given(arrays())
def test_a_file_holds_the_whole(
    tmp_path_factory: pytest.TempPathFactory, both: tuple[Joined, np.ndarray[Any, Any]]
) -> None:
    lazy, whole = both
    path = tmp_path_factory.mktemp("written") / "file"
    path.write_bytes(b"head" + bytes(whole.nbytes))
    writer = Writer()
    writer.write(Piece(path, 4, Spec("U16", whole.shape)), lazy)
    writer.close()
    assert path.read_bytes() == b"head" + whole.tobytes()


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(1 << 20))
    reader = Reader()
    tensor = reader.read(Piece(source, 0, Spec("U8", (1 << 20,))))
    os.truncate(source, 1000)
    target = tmp_path / "target"
    target.write_bytes(b"")
    writer = Writer(reader)
    with pytest.raises(ConversionError, match=r"source became shorter"):
        writer.write(Piece(target, 0, Spec("U8", (1 << 20,))), tensor)
    writer.close()
