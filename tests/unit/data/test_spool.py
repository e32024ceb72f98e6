"""Large columns of rows wait on disk, and whoever asks for them sees no difference."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll.config.sections.data import ColumnsConfig, SourceConfig
from roll.data.columns import map_row
from roll.data.sources import read_source
from roll.data.spool import LARGE_BYTES, SpooledRow, spooled

MEGABYTE = "ab" * 2**19


def test_large_values_are_read_when_they_are_asked_for() -> None:
    row = {"level": 3, "tests": MEGABYTE, "cases": {"input": [MEGABYTE, "1"]}, "none": None}
    kept = spooled(row)
    assert isinstance(kept, SpooledRow)
    assert kept == row
    assert list(kept) == list(row)
    assert dict(kept) == row
    assert kept["tests"] == MEGABYTE
    assert kept.get("other") is None
    assert len(repr(kept)) < 200
    assert pickle.loads(pickle.dumps(kept)) == row
    assert type(pickle.loads(pickle.dumps(kept))) is dict


def test_small_values_stay_in_a_dict() -> None:
    row = {"level": 3, "text": "a" * (LARGE_BYTES // 2), "list": [1, 2]}
    assert type(spooled(row)) is dict
    assert spooled(row) == row
    assert type(spooled({"text": "\U0001f9ee" * (LARGE_BYTES // 4)})) is SpooledRow


def test_a_fork_reads_the_rows_of_its_parent_and_spools_its_own() -> None:
    mine = spooled({"a": MEGABYTE})
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        own = spooled({"a": "cd" * 2**19})
        os.write(writer, b"1" if (mine["a"], own["a"]) == (MEGABYTE, "cd" * 2**19) else b"0")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1) == b"1"
    later = spooled({"a": "ef" * 2**19})
    assert (mine["a"], later["a"]) == (MEGABYTE, "ef" * 2**19)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_source_takes_little_memory_whatever_its_cases_take(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"problems.{ending}"
    rows = [{"question": f"q{i}", "private_test_cases": f"{i}" + MEGABYTE} for i in range(30)]
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, compression="none")
    source = SourceConfig(path=str(path), columns=ColumnsConfig(prompt="question", answer=None))
    del rows
    tracemalloc.start()
    try:
        read = read_source(source, map_row)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 2**20, held
    assert [row.extra["private_test_cases"][:2] for row in read[10:12]] == ["10", "11"]
    assert len(read) == 30
