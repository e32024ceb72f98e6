"""What is told of a dead worker, from the log that it left."""

from __future__ import annotations

from pathlib import Path

from roll.distributed.watchdog import LAST_LINES, last_lines


def test_the_last_lines_of_a_log_are_told_without_the_marks_of_ray(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(":job_id:1\none\ntwo\n")
    assert last_lines(log) == "  one\n  two"
    log.write_text("".join(f"{i}\n" for i in range(1000)))
    assert last_lines(log).split() == [str(i) for i in range(1000 - LAST_LINES, 1000)]


def test_a_log_that_cannot_be_read_does_not_hide_the_death(tmp_path: Path) -> None:
    """The thread that notices deaths reads it; its end would let every wait go on for ever."""
    assert last_lines(Path("/proc/self/mem")) == ""  # a file; reading its first page fails
    assert last_lines(tmp_path) == ""
    assert last_lines(tmp_path / "nowhere") == ""
