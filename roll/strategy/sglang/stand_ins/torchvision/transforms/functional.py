"""Importable names of `torchvision.transforms.functional`."""

from __future__ import annotations

from ..absent import absent


def __getattr__(name: str) -> object:
    return absent(__name__, name)
