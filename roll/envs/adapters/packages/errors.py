"""Errors of adapters."""

from __future__ import annotations


class AdapterError(Exception):
    """Mistake in the name or the settings of an environment, or an environment that the adapter
    cannot serve. The message says why and what to do."""
