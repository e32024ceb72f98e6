"""Encoded pictures and rows with them, for the tests of the data path."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def coloured(height: int, width: int, *, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    file = io.BytesIO()
    image.save(file, format=form, **options)
    return file.getvalue()


def in_every_form(image: Image.Image, folder: Path) -> dict[str, Any]:
    """The same picture in all forms that rows may hold."""
    data = file_of(image)
    (folder / "images").mkdir(exist_ok=True)
    path = folder / "images" / "one picture.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    return {
        "bytes": data,
        "relative path": "images/one picture.png",
        "absolute path": str(path),
        "file URL": path.as_uri(),
        "data URL": f"data:image/png;base64,{text}",
        "base64": text,
        "feature with bytes": {"bytes": data, "path": None},
        "feature with a path": {"bytes": None, "path": str(path)},
        "Pillow": image,
    }
