"""`roll watch`: a run that grows, in the terminal and as a page for browsers of this machine."""

from __future__ import annotations

import fcntl
import http.client
import json
import math
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from roll.cli import app
from roll.commands.watch import EVERY_S, Watch, pause_s
from roll.core.errors import DataError, UserError
from roll.output_dir import run_lock
from roll.output_dir.lock_owner import Owner
from roll.output_dir.resume import LOCK
from roll.output_dir.run_lock import RunLock
from roll.report.health.alarms import alarms
from roll.report.health.rules import RULES
from roll.report.live.progress import brief_time, progress
from roll.report.live.screen import BLOCKS, curve
from roll.report.live.server import LivePage, PageServer
from roll.report.page import page, waiting_page
from roll.report.read import NothingYetError, read_run, read_runs
from roll.report.records import RecordReader
from tests.unit.output.scripted_runs import SICK, run_records
from tests.unit.output.test_report_page import ATTACK, Page, a_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def one_more(folder: Path, by: int = 0) -> dict[str, object]:
    """The record of a next step, like those before; the last holds only a validation."""
    *_, before, last = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {**before, "step": last["step"] + by}


def test_a_long_run_is_looked_at_less_often() -> None:
    assert pause_s(0.01) == EVERY_S
    assert pause_s(3.0) == 27.0


def append(folder: Path, *records: dict[str, object]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_a_reader_takes_what_is_new_and_begins_anew_where_the_file_was_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RecordReader(path)
    with pytest.raises(FileNotFoundError):
        reader.read()
    path.write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a"')
    assert [record["step"] for record in reader.read()] == [0]
    with path.open("a") as file:
        file.write(': 2.0}\nno record\n{"step": 2, "a": 3.0}\n')
    assert [record["a"] for record in reader.read()] == [1.0, 2.0, 3.0]
    assert reader.remark is not None
    assert "1 of 4 lines of metrics.jsonl hold no record, the first in line 3" in reader.remark
    assert reader.read() == RecordReader(path).read()
    other = tmp_path / "aside"  # as a run does that resumes from step 1
    other.write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a": 7.0}\n{"step": 2, "a": 8.0}\n')
    os.replace(other, path)
    assert [record["a"] for record in reader.read()] == [1.0, 7.0, 8.0]
    assert reader.remark is None


def test_a_curve_shows_the_means_of_stretches_and_what_is_not_finite() -> None:
    assert curve([0.0, 1.0], 30) == BLOCKS[0] + BLOCKS[-1]
    assert curve([5.0] * 9, 3) == BLOCKS[0] * 3
    assert curve([0.0, 0.0, 7.0, 7.0], 2) == BLOCKS[0] + BLOCKS[-1]
    assert curve([0.0, math.nan, 1.0], 3) == BLOCKS[0] + "!" + BLOCKS[-1]
    assert len(curve(list(range(1000)), 30)) == 30
    assert curve([math.inf, -math.inf], 1) == "!"
    assert curve([-1.7e308, 1.7e308], 2) == BLOCKS[0] + BLOCKS[-1]
    assert curve([1.7e308, 1.7e308], 1) == "!"


def test_times_are_told_for_people() -> None:
    assert [brief_time(s) for s in (0.4, 59.4, 185, 9600)] == [
        "0 s",
        "59 s",
        "3 min 05 s",
        "2 h 40 min",
    ]


def test_a_run_is_running_while_a_process_has_the_folder(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=30))
    run = read_run(folder, "r")
    assert run.written_s == (folder / "metrics.jsonl").stat().st_mtime
    assert progress(run, run.written_s).status == "unfinished"
    with RunLock(folder):
        now = progress(run, time.time() + 5.0)
        assert (now.status, now.done, now.planned) == ("running", 30, 120)
        assert now.waited_s == pytest.approx(5.0, abs=2.0)
        assert now.usual_s is not None
        assert now.left_s == pytest.approx(90 * now.usual_s)
        assert progress(run, time.time() + 3600.0 + 10 * now.usual_s).status == "silent"
    assert progress(run, time.time()).ended


def test_a_session_that_has_just_begun_is_not_silent(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=30))
    os.utime(folder / "metrics.jsonl", (0, 0))
    with RunLock(folder):
        now = progress(read_run(folder, "r"), time.time())
        assert now.status == "running"
        assert now.waited_s < 10.0


def test_a_run_elsewhere_is_running_while_it_touches_its_lock(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=30))
    owner = replace(Owner.this_process(), host="another", machine="another")
    (folder / LOCK).write_text(json.dumps(asdict(owner)))
    run = read_run(folder, "r")
    assert progress(run, time.time()).status == "running"
    assert progress(run, time.time() + 2 * run_lock.SILENT_S).status == "unfinished"


def test_steps_are_counted_from_the_first_of_the_runs_that_it_continues(tmp_path: Path) -> None:
    records = [record | {"step": record["step"] + 80} for record in run_records(steps=20)]
    now = progress(read_run(a_run(tmp_path / "r", records), "r"), time.time())
    assert (now.done, now.planned) == (100, 120)
    assert "100 of 120 steps" in Page(page([read_run(tmp_path / "r", "r")])).read


def test_the_screen_says_that_a_run_goes_on_and_how_it_ended(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=20))
    watched = Watch(folder)
    with RunLock(folder):
        assert watched.run().status == "running"
        before = watched.version()
    assert watched.version() != before, "the page is made anew when the process has gone"
    assert watched.run().status == "unfinished"
    (folder / "summary.json").write_text('{"status": "finished", "steps": 20}')
    assert watched.run().status == "finished"


def test_a_page_is_made_anew_when_its_run_becomes_silent(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=20))
    late = 0.0
    watched = Watch(folder, lambda: time.time() + late)
    with RunLock(folder):
        before = watched.version()
        assert watched.version() == before
        late = 1e6
        assert watched.version() != before
        assert watched.run().status == "silent"


def test_a_run_that_ended_before_its_first_step_is_told(tmp_path: Path) -> None:
    watched = Watch(tmp_path)
    assert "no run has begun" in watched.waits()
    with RunLock(tmp_path):
        assert "no step has ended yet" in watched.waits()
    (tmp_path / "summary.json").write_text('{"status": "failed", "error": "E: no memory"}')
    with pytest.raises(DataError, match="failed: E: no memory"):
        watched.waits()


def test_a_folder_that_is_begun_anew_waits_again(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=20))
    watched = Watch(folder)
    assert watched.run().done == 20
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(NothingYetError):
        watched.run()


def in_a_terminal(folder: Path, term: str) -> tuple[int, str]:
    """Exit code and output of `roll watch` in a terminal of 60 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 60, 0, 0))
    command = [sys.executable, "-m", "roll.cli", "watch", str(folder)]
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": term}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        found = b""
        with suppress(OSError):  # the other side has closed
            while part := os.read(ours, 65536):
                found += part
    os.close(ours)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", found.decode())


def test_a_terminal_that_draws_no_screen_is_refused(tmp_path: Path) -> None:
    code, told = in_a_terminal(a_run(tmp_path / "r", run_records(steps=20)), "dumb")
    assert code == 2
    assert "(TERM=dumb): take --once" in " ".join(told.split())


def test_a_terminal_wraps_what_alarms_say(tmp_path: Path) -> None:
    """As `roll watch` draws it, until the run has ended."""
    name, records = next(iter(SICK.items()))
    folder = a_run(tmp_path / name, records)
    code, shown = in_a_terminal(folder, "xterm")
    assert code == 0
    words = shown.split()
    told = f"Try: {next(a.advice for a in alarms(read_run(folder, name).records, RULES))}.".split()
    assert all(word in words for word in told)


def test_the_command_shows_alarms_with_what_to_try(tmp_path: Path) -> None:
    name, records = next(iter(SICK.items()))
    folder = a_run(tmp_path / name, records)
    told = CliRunner().invoke(app, ["watch", str(folder), "--once"])
    assert told.exit_code == 0, told.output
    assert "Try: " in told.output
    assert f"{name} · unfinished" in told.output


@pytest.mark.parametrize("flags", [(), ("--once",)])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app, ["watch", str(tmp_path / "none"), *flags])
    assert told.exit_code == 2
    assert "is no folder" in told.output
    told = CliRunner().invoke(app, ["watch", str(tmp_path), *flags])
    assert told.exit_code != 0
    assert ("no terminal" if not flags else "first step") in told.output


@pytest.mark.parametrize(
    ("flags", "says"), [(["--once", "--serve"], "take one"), (["--port", "0"], "give --serve, too")]
)
def test_options_that_would_do_nothing_are_refused(
    tmp_path: Path, flags: list[str], says: str
) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=20))
    told = CliRunner().invoke(app, ["watch", str(folder), *flags])
    assert told.exit_code == 2
    assert says in " ".join(told.output.split())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, PageServer]]:
    folder = a_run(tmp_path / "r", run_records(steps=20))
    watched = Watch(folder)
    live = LivePage(watched.version, lambda version: page([watched.run()], version=version))
    with PageServer(live) as server:
        yield folder, server


def test_the_page_is_made_anew_when_the_run_has_written(served: tuple[Path, PageServer]) -> None:
    folder, server = served
    first = urlopen(server.url, timeout=10).read().decode()
    assert "20 of 120 steps" in Page(first).read
    assert urlopen(server.url, timeout=10).read().decode() == first
    version = server.url.replace("/?", "/version?")
    before = urlopen(version, timeout=10).read().decode()
    assert f'data-version="{before}"' in first
    append(folder, one_more(folder))
    assert urlopen(version, timeout=10).read().decode() != before
    assert "21 of 120 steps" in Page(urlopen(server.url, timeout=10).read().decode()).read


def test_strangers_are_refused(served: tuple[Path, PageServer]) -> None:
    """Without the token, with another one, and under a name that only points to this machine."""
    _, server = served
    address = urlsplit(server.url)
    assert address.hostname == "127.0.0.1"
    bare = server.url.partition("?")[0]
    for url in (bare, f"{server.url}x", server.url[:-1], f"{server.url}%C3%BC", f"{bare}?token="):
        with pytest.raises(HTTPError) as refused:
            urlopen(url, timeout=10)
        assert refused.value.code == 403
        assert "Entropy" not in refused.value.read().decode()
    for host in (f"evil.example:{address.port}", "evil.example", "[", "127.0.0.1.evil.example", ""):
        with pytest.raises(HTTPError) as refused:
            urlopen(Request(server.url, headers={"Host": host}), timeout=10)
        assert refused.value.code == 403
    for host in ("127.0.0.1", "LOCALHOST:80", f"localhost:{address.port}"):
        urlopen(Request(server.url, headers={"Host": host}), timeout=10)
    link = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=10)
    link.request("POST", f"/?{address.query}")
    assert link.getresponse().status == 501
    with pytest.raises(HTTPError) as refused:
        urlopen(server.url.replace("/?", "/../metrics.jsonl?"), timeout=10)
    assert refused.value.code == 404


def test_a_page_that_is_not_served_asks_nobody(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=20))
    text = page([read_run(folder, "r")])
    assert "connect-src" not in text
    assert "data-version" not in text


def test_a_run_without_a_step_has_a_page_that_waits(tmp_path: Path) -> None:
    with pytest.raises(NothingYetError, match="first step"):
        Watch(tmp_path).run()
    shown = Page(waiting_page(ATTACK, "no step", "7"))
    assert "no step" in shown.read
    assert [dict(a).get("data-version") for tag, a in shown.elements if tag == "body"] == ["7"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_a_browser_follows_the_run(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=20))
    watched = Watch(folder)
    asked = []

    def version() -> str:
        asked.append(watched.version())
        if len(asked) == 3:  # the page has asked once, and was the newest
            append(folder, *(one_more(folder, by) for by in range(13)))
        return watched.version()

    with PageServer(
        LivePage(version, lambda version: page([watched.run()], version=version))
    ) as server:
        command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=9000"]
        found = subprocess.run(
            [*command, server.url], capture_output=True, text=True, timeout=120, check=True
        )
    assert "33 of 120 steps" in found.stdout
    assert "<svg" in found.stdout


def test_a_folder_above_runs_and_a_missing_one_name_the_runs(tmp_path: Path) -> None:
    for name in ("outputs/first", "outputs/deeper/second"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    looks: list[Callable[[Path], object]] = [
        lambda folder: read_runs([folder]),
        lambda folder: read_runs([folder, tmp_path]),
        Watch,
    ]
    above, missing = tmp_path / "outputs", tmp_path / "outputs" / "frist"
    for folder, what in ((above, "holds no run yet"), (missing, "is no folder")):
        said = set[str]()
        for look in looks:
            with pytest.raises(UserError) as caught:
                look(folder)
            said.add(str(caught.value))
        [told] = said
        assert told.startswith(f"{folder} {what}")
        assert told.endswith(f"; runs in {above}: deeper/second, first")
