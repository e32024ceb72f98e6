"""Arrays that are nowhere put together, beside those that are."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_adapter.convert.arrays import cut, join
from mcore_adapter.convert.joined import Joined
from mcore_adapter.convert.tensorfile import Piece, Spec, Writer
from mcore_adapter.sizes import ParallelSizes
from tests.convert.tiny_checkpoints import assert_same, numbered, there_and_back


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
@settings(max_examples=300, deadline=None)
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
            pieces, expected = cut(lazy, lengths, dim), cut(whole, lengths, dim)
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
@settings(deadline=None)
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


@pytest.mark.parametrize("done", [0, 3])
def test_a_kernel_that_does_not_copy_between_files_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    """Or that stops on its way."""
    copy, calls = os.copy_file_range, 0

    def stops(source: int, file: int, count: int, *offsets: int) -> int:
        nonlocal calls
        calls += 1
        if not done or calls % 2 == 0:
            raise OSError(errno.EXDEV, "no")
        return copy(source, file, min(count, done), *offsets)

    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "intermediate_size": 8,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_experts": 0,
        "num_hidden_layers": 2,
        "vocab_size": 9,
    }
    source = numbered(tmp_path / "hf", config)
    monkeypatch.setattr(os, "copy_file_range", stops)
    assert_same(source, there_and_back(source, tmp_path, ParallelSizes(tp=2)))
    assert calls
