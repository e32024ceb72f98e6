"""The four moves on a board, and how an action names one."""

from __future__ import annotations

import re
from collections.abc import Iterable

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""(rows down, columns to the right) of each move."""
_WORD = re.compile(f"(?<![a-z])(?:{'|'.join(MOVES)})(?![a-z])", re.IGNORECASE)


def last_move(action: str) -> str | None:
    """Return the last of the four words in an action; None if there is none."""
    words = _WORD.findall(action)
    return words[-1].lower() if words else None


def told_fields(fields: Iterable[tuple[int, int]]) -> str:
    """Return fields (row, column) as words; `none` if there are none."""
    return "; ".join(f"row {row} column {column}" for row, column in sorted(fields)) or "none"
