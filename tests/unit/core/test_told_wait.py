"""Long waits say what is waited for."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from roll.core.threads.told_wait import told_wait


def test_a_long_wait_names_itself_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    threads = threading.active_count()
    with caplog.at_level(logging.INFO), told_wait("the engines", every_s=0.01):
        deadline = time.monotonic() + 60
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "still waiting for the engines" in caplog.text
    assert threading.active_count() == threads
