"""Boxes of objects, read from JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Coordinates = Literal["xyxy", "xywh"]
"""Meaning of four numbers: two opposite corners, or the upper left corner, width and height."""

MAX_BOXES = 1000
"""Largest number of boxes of a response; more are no valid answer."""
MAX_COORDINATE = 1e6
"""Largest number in a box."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box with the label of its object."""

    x: float
    y: float
    width: float
    height: float
    label: str
    confidence: float = 1.0
    crowd: bool = False
    """True for a box of a ground truth around many objects. A detection inside of it counts neither
    as right nor as wrong (COCO's `iscrowd`)."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names under which a box has its values."""

    box: str
    label: str
    confidence: str
    coordinates: Coordinates


def read_boxes(value: object, keys: Keys) -> list[Box]:
    """Return the boxes of a list of mappings.

    Raises:
        ValueError: the value is no such list, or a box is no box: not four finite numbers, no area,
            or no label that is a text.
    """
    if not isinstance(value, list) or len(value) > MAX_BOXES:
        raise ValueError(f"expected a list of at most {MAX_BOXES} boxes")
    return [_read(entry, keys) for entry in value]


def load_strict(text: str) -> Any:
    """Return a JSON value; ValueError if the text is none, has NaN or infinity, or is nested too
    deeply."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _read(entry: object, keys: Keys) -> Box:
    """Return the box of one entry of the list; ValueError says what is wrong with it."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"expected a mapping with the key {keys.box!r}, found {entry!r:.60}")
    numbers, label = entry.get(keys.box), entry.get(keys.label)
    if not isinstance(label, str) or not label.strip():
        raise ValueError(f"{keys.label!r} must be a text, found {label!r:.60}")
    if not isinstance(numbers, list | tuple) or len(numbers) != 4:
        raise ValueError(f"{keys.box!r} must be four numbers, found {numbers!r:.60}")
    x, y, a, b = (_number(each) for each in numbers)
    width, height = (a - x, b - y) if keys.coordinates == "xyxy" else (a, b)
    if width <= 0 or height <= 0:
        raise ValueError(f"the box {numbers!r:.60} has no area")
    confidence = _number(entry.get(keys.confidence, 1.0))
    crowd = bool(entry.get("iscrowd", False))
    return Box(x, y, width, height, label.strip().casefold(), confidence, crowd)


def _number(value: object) -> float:
    """Return a finite number of at most MAX_COORDINATE as a float; ValueError for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_COORDINATE or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"expected a number of at most {MAX_COORDINATE:g}, found {value!r:.40}")
    return float(value)  # type: ignore[arg-type]
