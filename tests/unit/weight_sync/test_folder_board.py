"""Waits for files in a folder that other hosts write to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.transports.files import FolderBoard


def test_who_waits_for_a_file_makes_a_client_of_nfs_ask_the_server_again(tmp_path: Path) -> None:
    channel = Channel("files", str(tmp_path), num_receivers=1, bucket_bytes=1, timeout_s=0.2)
    board = FolderBoard(channel, "reader")
    os.utime(tmp_path, (0, 0))
    with pytest.raises(WeightSyncError, match=r"waited 0\.2 s for the writer"):
        board.wait(tmp_path / "bucket", "the writer")
    assert tmp_path.stat().st_mtime > 0
