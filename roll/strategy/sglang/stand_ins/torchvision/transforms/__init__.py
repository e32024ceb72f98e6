"""Importable names of `torchvision.transforms`; importers look up members of the enum."""

from __future__ import annotations

from enum import Enum

from ..absent import absent


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> object:
    return absent(__name__, name)
