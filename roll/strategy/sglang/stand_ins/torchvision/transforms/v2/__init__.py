"""Importable names of `torchvision.transforms.v2`."""

from __future__ import annotations

from ...absent import absent


def __getattr__(name: str) -> object:
    return absent(__name__, name)
