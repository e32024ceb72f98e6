"""The consoles that commands print to."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console

WHOLE_WIDTH = 10_000
"""Width of an output that is no terminal, in characters: no table is cut there."""


def console(*, stderr: bool = False, **settings: Any) -> Console:
    """Return a console as wide as the terminal. A pipe or a file has no width, and gets whole
    lines, unless the variable COLUMNS says how wide it is.

    Args:
        stderr: print to stderr, not to stdout.
        settings: further settings of rich's `Console`.
    """
    stream = sys.stderr if stderr else sys.stdout
    given = stream.isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, width=None if given else WHOLE_WIDTH, **settings)
