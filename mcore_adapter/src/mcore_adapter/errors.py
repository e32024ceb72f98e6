"""Errors of this package. Each message says what is wrong and what to do."""

from __future__ import annotations

_LONGEST = 4000
"""Largest number of characters of a message."""


class McoreAdapterError(Exception):
    """Base class of all errors of this package.

    The message is one line that a terminal can show: control characters are escaped and long texts
    cut, because a message may quote names in files, which can contain anything.
    """

    def __init__(self, message: str) -> None:
        text = printable(message)
        super().__init__(text if len(text) <= _LONGEST else text[:_LONGEST] + "...")


class LayoutError(McoreAdapterError):
    """Parallel sizes that do not fit the model or each other."""


class ConversionError(McoreAdapterError):
    """Checkpoint that cannot be read, converted or written, or that lacks tensors."""


class UnknownModelError(McoreAdapterError):
    """Model type for which there is no table."""


class ConfigError(McoreAdapterError):
    """Configuration that cannot be built, for example a value in a `config.json`."""


class DataError(McoreAdapterError):
    """Row of a data file that cannot be used for training."""


def printable(text: str) -> str:
    """Return the text with control characters and broken Unicode replaced by escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
