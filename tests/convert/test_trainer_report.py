"""The file of metrics outlives what ends a run in the middle of a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_adapter.errors import ConversionError
from tests.convert.spawned import run_ranks
from tests.full_disk import files_up_to

STEPS = [{"step": step, "loss": 2.0} for step in (1, 2, 2, 3)]


def resumed(path: Path, first_step: int, room: int) -> str | None:
    """Why a run cannot go on after `first_step` steps, with room for files of `room` bytes."""
    from mcore_adapter.train.report import Report

    try:
        with files_up_to(room):
            Report(path, speaks=True, first_step=first_step, num_steps=9, every=1)
    except ConversionError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "torn", [b'{"step": 4, "lo', b"\0\0\0\0", b"\xff\xfe\n", b"7", b'{"st": 1}']
)
def test_a_line_that_is_not_whole_is_left_out(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in STEPS) + torn)
    assert run_ranks(resumed, 1, path, 2, 10**6, timeout_s=60) == [None]
    assert [json.loads(line) for line in path.read_text().splitlines()] == STEPS[:3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_without_steps_begins_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(STEPS[0]))
    assert run_ranks(resumed, 1, path, 0, 10**6, timeout_s=60) == [None]
    assert path.read_text() == ""


def test_metrics_that_cannot_be_written_anew_are_still_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = "".join(f"{json.dumps(line)}\n" for line in STEPS)
    path.write_text(before)
    (said,) = run_ranks(resumed, 1, path, 3, 20, timeout_s=60)
    assert said.startswith(f"rank 0 cannot write {path}: ")
    assert path.read_text() == before
