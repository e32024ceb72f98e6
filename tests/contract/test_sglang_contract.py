"""SGLang beyond the suite of all engines: parallel ranks, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import psutil
import pytest

from roll.strategy.available import status
from tests.contract.engine_rig import assert_agrees, shake, start, weights_of
from tests.tiny import save_tiny_model
from tests.unit.distributed.test_reaper import gone_within


@pytest.mark.slow
@pytest.mark.skipif(not status("sglang").ok, reason=status("sglang").advice)
def test_two_tensor_parallel_ranks_agree_with_hugging_face_before_and_after_a_push(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    rig = start("sglang", save_tiny_model(tmp_path, tied=False), loop, tp=2)
    try:
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        shake(rig.oracle, seed=1)
        sent, loaded = rig.push(weights_of(rig.oracle), receivers=2)
        assert loaded.checksum == sent.checksum
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        files = shared_files()
        assert files
    finally:
        rig.run(rig.engine.close())
    # Python's resource tracker removes them, whenever it gets a core.
    assert gone_within(300, list(files)), trackers()


def shared_files() -> set[Path]:
    """Files in /dev/shm that processes below this one have mapped."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            named = (line for line in lines if " /dev/shm/" in line and "(deleted)" not in line)
            found |= {Path(line.split()[-1]) for line in named}
    return found


def trackers() -> list[str]:
    """Every resource tracker that lives, and the processes that can still write to its pipe."""
    found = []
    for tracker in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(tracker.cmdline())
            if "resource_tracker" not in command:
                continue
            pipe = os.readlink(
                f"/proc/{tracker.pid}/fd/{command.rpartition('main(')[2].strip(')')}"
            )
            found.append(f"{tracker.pid} {tracker.status()}: held by {holders(pipe)}")
    return found


def holders(pipe: str) -> list[str]:
    """Processes with an open file of this name."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            folder = Path(f"/proc/{process.pid}/fd")
            if any(os.readlink(file) == pipe for file in folder.iterdir()):
                found.append(f"{process.pid} {process.name()}")
    return found
