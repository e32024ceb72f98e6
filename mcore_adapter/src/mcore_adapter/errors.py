"""What can go wrong, in words that say what to do."""

from __future__ import annotations


class AdapterError(Exception):
    """Base of all errors of this package."""


class LayoutError(AdapterError):
    """Parallel sizes do not fit the model or each other."""


class ConversionError(AdapterError):
    """A checkpoint does not have the tensors that its model type promises."""


class UnknownModelError(AdapterError):
    """No table for this model type."""


class ConfigError(AdapterError):
    """A `config.json` says something that cannot be built."""


class DataError(AdapterError):
    """A row of a data file cannot be trained on."""
