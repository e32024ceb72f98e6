"""Logging of one process; each line carries a tag, such as role and rank."""

from __future__ import annotations

import logging
import sys


def setup_logging(tag: str, *, level: int = logging.INFO) -> None:
    """Send the `roll` log of this process to standard error, with time and `tag` on each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {tag} %(levelname)s %(message)s", "%H:%M:%S")
    )
    logger = logging.getLogger("roll")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
