"""The `detection` reward: are the boxes of a response those of the objects in the image?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from roll.core.errors import DataError
from roll.core.types import Sample
from roll.rewards.api import Reward
from roll.rewards.detection.boxes import Box, Coordinates, Keys, load_strict, read_boxes
from roll.rewards.text.json_schema import json_text
from roll.rewards.text.references import final_of

if TYPE_CHECKING:
    import numpy.typing as npt

Measure = Literal["iou", "map", "ap50", "count", "format"]


def detection_reward(
    sample: Sample,
    *,
    measure: Measure = "iou",
    truth: str | None = None,
    box: str = "bbox_2d",
    label: str = "label",
    confidence: str = "score",
    coordinates: Coordinates = "xyxy",
    labels: bool = True,
) -> Reward:
    """Return how well the boxes of a response agree with those of its row, in 0..1.

    The response is a JSON list of mappings, such as `[{"bbox_2d": [x1, y1, x2, y2], "label":
    "cat"}]`, as a whole or in its last fenced block. One invalid box makes the list invalid, which
    scores 0.

    * `iou`: the intersection over union of matched boxes of the same label, summed and divided by
      the number of boxes of the longer list. Boxes are matched in the order of falling IoU. Missing
      and superfluous boxes both cost.
    * `map` and `ap50`: COCO's average precision (`AP` and `AP50` of pycocotools, with this image as
      the whole data set). They hardly punish superfluous boxes of low confidence, and not at all
      those of labels that the image lacks; add `count` if a policy finds that out.
    * `count`: 1 - |boxes found - boxes there| / the larger one, by label and added up.
    * `format`: 1 if the list is valid.

    If the image has no objects, an empty list scores 1 and any other 0.

    Args:
        sample: sample to score.
        measure: the measure that is the score.
        truth: column with the boxes of the row; if left out, the answer of the row as JSON. Boxes
            with `iscrowd: 1` are COCO's crowds; only `map` and `ap50` look at them.
        box, label, confidence: keys of a box, both in rows and responses. The confidence of a
            response's box is 1 where it is missing.
        coordinates: meaning of the four numbers, both in rows and responses: `xyxy` or `xywh`.
        labels: False ignores labels: all objects are of one kind, and need none.

    Parts: all measures, each with its name.

    Raises:
        DataError: the boxes of the row cannot be read.
    """
    keys = Keys(box, label, confidence, coordinates)
    there = _truth(sample, truth, keys, labels)
    found = _found(sample, keys, labels)
    parts = dict.fromkeys(("iou", "map", "ap50", "count", "format"), 0.0)
    if found is not None:
        parts = _measures(found, there) | {"format": 1.0}
    return Reward(parts[measure], parts)


def _measures(found: Sequence[Box], there: Sequence[Box]) -> dict[str, float]:
    """Return all measures but `format`, in 0..1. Crowds count in `map` and `ap50` only."""
    from roll.rewards.detection.coco import average_precisions, iou_matrix

    single = [box for box in there if not box.crowd]
    if not single:
        return dict.fromkeys(("iou", "map", "ap50", "count"), float(not found))
    wanted, given = Counter(b.label for b in single), Counter(b.label for b in found)
    off = sum(abs(wanted[name] - given[name]) for name in wanted | given)
    most = sum((wanted | given).values())
    precisions = average_precisions(found, there)
    return {
        "iou": _matched(iou_matrix(found, single), found, single) / max(len(found), len(single)),
        "map": float(precisions.mean()),
        "ap50": float(precisions[0]),
        "count": 1 - off / most,
    }


def _matched(ious: npt.NDArray[Any], found: Sequence[Box], there: Sequence[Box]) -> float:
    """Return the sum of the IoU of matched boxes."""
    pairs = sorted(
        (-float(ious[i, j]), i, j)
        for i, one in enumerate(found)
        for j, other in enumerate(there)
        if one.label == other.label and ious[i, j] > 0
    )
    total, used_found, used_there = 0.0, set(), set()
    for negative, i, j in pairs:
        if i not in used_found and j not in used_there:
            used_found.add(i)
            used_there.add(j)
            total -= negative
    return total


def _found(sample: Sample, keys: Keys, labels: bool) -> list[Box] | None:
    """Return the boxes of a response; None if it has no valid list."""
    text = json_text(final_of(sample), "auto")
    try:
        return read_boxes(_labelled(load_strict(text or ""), keys, labels), keys)
    except ValueError:
        return None


def _truth(sample: Sample, column: str | None, keys: Keys, labels: bool) -> list[Box]:
    """Return the boxes of the row, from a column or else the answer; DataError if they cannot be
    read. Empty text: no boxes."""
    where = "the answer" if column is None else f"column {column!r}"
    value = sample.answer if column is None else sample.extra.get(column)
    try:
        if isinstance(value, str):
            value = load_strict(value) if value.strip() else []
        return read_boxes(_labelled(value, keys, labels), keys)
    except ValueError as error:
        raise DataError(f"row {sample.prompt.id}: {where} has no boxes: {error}") from None


def _labelled(value: object, keys: Keys, labels: bool) -> object:
    """Return the list of boxes with one label for all if labels are ignored."""
    if labels or not isinstance(value, list):
        return value
    return [
        {**entry, keys.label: "object"} if isinstance(entry, dict) else entry for entry in value
    ]
