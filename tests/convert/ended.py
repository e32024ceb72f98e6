"""Starts `victim`, perhaps on a disk that fills up or cannot lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A conversion to a layout, and what ends it."""

    src: str
    dst: str
    sizes: dict[str, int] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    workers: int = 1
    signal: int = 0
    at: int = 1
    """After so many tensors; 0: when the first worker is forked."""
    full_after: int | None = None
    """Bytes that each process can write."""
    no_locks: int | None = None
    """Error number of the file system when something is to be locked."""


@dataclass(frozen=True)
class End:
    """How a case ended."""

    code: int
    """Exit code; of a signal, less than 0."""
    alive: int
    """Workers that are still there."""
    message: str


def run_cases(cases: Sequence[Case], folder: Path) -> list[End]:
    """One after the other; `folder` is for scratch files."""
    script = folder / "cases.json"
    script.write_text(json.dumps([asdict(case) for case in cases]))
    environment = {**os.environ, "LD_PRELOAD": str(full_disk())}
    command = [sys.executable, "-m", "tests.convert.victim", str(script)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    script.unlink()
    assert done.returncode == 0, done.stderr
    found, message = [], ""
    for line in done.stdout.splitlines():
        if not line.startswith("{"):
            message += line
            continue
        end = json.loads(line)
        found.append(End(end["ended"], end["alive"], message))
        message = ""
    assert len(found) == len(cases), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return found


@cache
def full_disk() -> Path:
    """The library that fills a disk and takes its locks away."""
    library = Path(mkdtemp()) / "full_disk.so"
    source = Path(__file__).with_name("full_disk.cc")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
