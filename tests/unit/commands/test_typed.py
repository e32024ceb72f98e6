"""Signals that come while a user types, in a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

# The thread takes the signal, so the wait of readline, in the main thread, is not interrupted: as
# if it had come just before the wait.
WAITING = """
import signal, threading, time
from roll.commands.chat.session import typed_lines
from roll.distributed.processes.shutdown import exit_at_hangup

def send():
    time.sleep(1)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

with exit_at_hangup():
    threading.Thread(target=send).start()
    next(typed_lines())
"""


def test_a_signal_that_does_not_interrupt_the_wait_for_a_key_ends_it_nevertheless() -> None:
    end, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=other, stdout=other, stderr=other
    )
    os.close(other)
    try:
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        os.close(end)
