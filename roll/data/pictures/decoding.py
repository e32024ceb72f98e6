"""Opening of encoded pictures. Pillow is imported here only, when the first picture is opened."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

from roll.core.errors import PictureError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF", "ICO")
"""Formats that are opened. Pillow knows others; it opens some of them with other programs."""
ORIENTATION = 0x0112
"""Number of the EXIF tag that says how a camera was held."""


def upright_size(data: bytes | str) -> tuple[int, int]:
    """Return height and width of a picture as people see it, in pixels. Only its header is read.

    Args:
        data: the encoded picture, or the path of its file.

    Raises:
        PictureError: this is no picture, or its header is damaged.
    """
    try:
        with _opened(data) as image:
            width, height = image.size
            return (width, height) if _orientation(image) >= 5 else (height, width)
    except Exception as error:
        raise PictureError(_what_failed(error)) from error


def decoded(data: bytes) -> Image:
    """Return a picture as people see it, in RGB: the first one of several in a file, turned as its
    camera was held, and in front of white where it is transparent.

    Raises:
        PictureError: the picture is damaged, or of a kind that has no colours.
    """
    from PIL import Image
    from PIL.ImageOps import exif_transpose

    try:
        with _opened(data) as image:
            turned = _orientation(image) > 1
            image.load()
            whole = exif_transpose(image) if turned else image
            if whole.mode.startswith("I;16"):
                whole = _scaled(whole)
            elif whole.mode in ("I", "F"):
                raise ValueError(f"pixels are numbers of 32 bits (mode {whole.mode})")
            if whole.has_transparency_data:
                front = whole.convert("RGBA")
                whole = Image.alpha_composite(Image.new("RGBA", front.size, "white"), front)
            return whole.convert("RGB")
    except Exception as error:
        raise PictureError(_what_failed(error)) from error


def _scaled(image: Image) -> Image:
    """Return a picture of 16 bits as one of 8 bits. Pillow would clip its values."""
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def png(image: Image) -> bytes:
    """Return a picture as a PNG file."""
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def _opened(data: bytes | str) -> Image:
    """Return the picture with its header read; OSError and others if this is no picture."""
    from PIL import Image

    return Image.open(BytesIO(data) if isinstance(data, bytes) else data, formats=_known())


@cache
def _known() -> list[str]:
    """Return those of `FORMATS` that the installed Pillow opens."""
    from PIL import Image

    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _orientation(image: Image) -> int:
    """Return the number in a picture's EXIF tag of the orientation; 1, which is upright, if it has
    none. PNG files have EXIF data behind their pixels, too, which is not read; Pillow itself turns
    TIFF files."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return 1
    return int(image.getexif().get(ORIENTATION, 1))


def _what_failed(error: Exception) -> str:
    """Return what is wrong with a picture in one line. Pillow's messages name objects in memory,
    which say nothing."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return f"no picture in a known format ({', '.join(FORMATS)})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
