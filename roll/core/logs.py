"""One logger per process, tagged with role and rank."""

from __future__ import annotations

import logging
import sys


def setup_logging(tag: str, *, level: int = logging.INFO) -> None:
    """Send this process's `roll` log to standard error, each line beginning with `tag`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {tag} %(levelname)s %(message)s", "%H:%M:%S")
    )
    logger = logging.getLogger("roll")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
