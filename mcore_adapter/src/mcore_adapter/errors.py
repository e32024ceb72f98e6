"""What can go wrong, in words that say what to do."""

from __future__ import annotations

_LONGEST = 4000
"""Characters of a message: names in files can be of any length."""


class McoreAdapterError(Exception):
    """Base of all errors of this package. Its message is one line that a terminal can show: names
    in files, which it may quote, can hold anything."""

    def __init__(self, message: str) -> None:
        text = printable(message)
        super().__init__(text if len(text) <= _LONGEST else text[:_LONGEST] + "...")


class LayoutError(McoreAdapterError):
    """Parallel sizes do not fit the model or each other."""


class ConversionError(McoreAdapterError):
    """A checkpoint does not have the tensors that its model type promises."""


class UnknownModelError(McoreAdapterError):
    """No table for this model type."""


class ConfigError(McoreAdapterError):
    """A `config.json` says something that cannot be built."""


class DataError(McoreAdapterError):
    """A row of a data file cannot be trained on."""


def printable(text: str) -> str:
    """The text with control characters and broken Unicode as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
