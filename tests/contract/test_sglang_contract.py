"""SGLang beyond the suite of all engines: parallel ranks, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import site
from pathlib import Path

import psutil
import pytest

from roll.strategy.available import status
from tests.contract.engine_rig import assert_agrees, outer_and_inner, shake, start, weights_of
from tests.other_python import make_python
from tests.tiny import save_tiny_model


@pytest.mark.slow
@pytest.mark.skipif(not status("sglang").ok, reason=status("sglang").advice)
def test_two_tensor_parallel_ranks_agree_with_hugging_face_before_and_after_a_push(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    rig = start("sglang", save_tiny_model(tmp_path, tied=False), loop, tp=2)
    # Python's resource tracker would remove the files, but it may be killed with the engine.
    server, _ = outer_and_inner("sglang")
    (tracker,) = (p for p in server.children() if "resource_tracker" in " ".join(p.cmdline()))
    try:
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        shake(rig.oracle, seed=1)
        sent, loaded = rig.push(weights_of(rig.oracle), receivers=2)
        assert loaded.checksum == sent.checksum
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        files = shared_files()
        assert files
        tracker.kill()
    finally:
        rig.run(rig.engine.close())
    assert not [file for file in files if file.exists()]


@pytest.mark.slow
@pytest.mark.skipif(not status("sglang").ok, reason=status("sglang").advice)
def test_an_engine_in_another_python_agrees_before_and_after_a_push(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    python = make_python(tmp_path / "python", *map(Path, site.getsitepackages()))
    rig = start("sglang", save_tiny_model(tmp_path / "model", tied=False), loop, python=python)
    try:
        server, _ = outer_and_inner("sglang")
        assert server.cmdline()[0] == python
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        shake(rig.oracle, seed=1)
        sent, loaded = rig.push(weights_of(rig.oracle))
        assert loaded.checksum == sent.checksum
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
    finally:
        rig.run(rig.engine.close())


def shared_files() -> set[Path]:
    """Files in /dev/shm that processes below this one have mapped."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            named = (line for line in lines if " /dev/shm/" in line and "(deleted)" not in line)
            found |= {Path(line.split()[-1]) for line in named}
    return found
