"""`told_wait`: a long wait that says, again and again, what is waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

EVERY_S = 20.0
"""Time between two lines about a wait, in seconds."""


@contextmanager
def told_wait(what: str, every_s: float = EVERY_S) -> Iterator[None]:
    """Log every `every_s` seconds that the block is still waited for.

    Args:
        what: text for the line, such as `actor_train: its workers start`.
    """
    ended, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(every_s):
            logger.info("still waiting for %s (%.0f s)", what, time.monotonic() - begun)

    thread = threading.Thread(target=tell, name="roll-told-wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
