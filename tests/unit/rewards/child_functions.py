"""What children run in the tests of their pool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable


def make_worker() -> Callable[[str], str]:
    """Do what the argument says."""

    def work(what: str) -> str:
        match what:
            case "sleep":
                time.sleep(0.6)
            case "spin":
                while True:
                    pass
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "die":
                os._exit(3)
        return what

    return work
