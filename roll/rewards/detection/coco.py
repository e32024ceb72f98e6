"""Average precision of detections in one image, with the numbers of pycocotools.

The rules are those of COCO's evaluation of boxes (Lin et al. 2014, arXiv:1405.0312; `COCOeval` with
`iouType="bbox"`, all areas, at most 100 detections of a label).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from roll.rewards.detection.boxes import Box

THRESHOLDS = tuple(np.linspace(0.5, 0.95, 10).tolist())
"""IoU from which a detection is right, of the ten average precisions whose mean is mAP."""
MAX_DETECTIONS = 100
_RECALLS = np.linspace(0.0, 1.0, 101)

Array = npt.NDArray[np.float64]


def iou_matrix(found: Sequence[Box], truth: Sequence[Box]) -> Array:
    """Return the intersection over union of each pair, shape [found, truth]; for a box of a crowd
    the intersection over the detection's area."""
    a, b = _corners(found), _corners(truth)
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    both = np.prod(np.maximum(high - low, 0.0), axis=2)
    area_a = np.prod(a[:, 2:] - a[:, :2], axis=1)[:, None]
    area_b = np.prod(b[:, 2:] - b[:, :2], axis=1)[None, :]
    crowd = np.array([box.crowd for box in truth], dtype=bool)
    union = np.where(crowd[None, :], area_a, area_a + area_b - both)
    return np.asarray(both / union, dtype=np.float64)


def average_precisions(found: Sequence[Box], truth: Sequence[Box]) -> Array:
    """Return the mean over labels of the average precision at each of `THRESHOLDS`.

    Labels that the truth lacks do not count, so that their detections cost nothing. Without any box
    in the truth that is no crowd, returns zeros (COCO: -1, undefined).
    """
    labels = sorted({box.label for box in truth if not box.crowd})
    if not labels:
        return np.zeros(len(THRESHOLDS))
    of_labels = [
        _of_label([f for f in found if f.label == name], [t for t in truth if t.label == name])
        for name in labels
    ]
    return np.asarray(np.mean(of_labels, axis=0), dtype=np.float64)


def _of_label(found: list[Box], truth: list[Box]) -> Array:
    """Return the average precision of one label at each threshold."""
    order = np.argsort([-box.confidence for box in found], kind="mergesort")[:MAX_DETECTIONS]
    found = [found[i] for i in order]
    truth = sorted(truth, key=lambda box: box.crowd)
    wanted = sum(not box.crowd for box in truth)
    if not found:
        return np.zeros(len(THRESHOLDS))
    ious = iou_matrix(found, truth)
    return np.array([_at(threshold, ious, truth, wanted) for threshold in THRESHOLDS])


def _at(threshold: float, ious: Array, truth: list[Box], wanted: int) -> float:
    """Return the average precision at one threshold.

    The rows of `ious` are detections in falling confidence, its columns are `truth`, crowds last;
    `wanted` is the number of boxes that are no crowds, at least 1.
    """
    matches = _match(threshold, ious, truth)
    counted = [match for match in matches if match is None or not truth[match].crowd]
    right = np.cumsum([match is not None for match in counted])
    if not len(right):
        return 0.0
    recall = right / wanted
    precision = right / np.arange(1, len(right) + 1)
    # The precision at a recall is the best one at this or a higher recall.
    best = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(recall, _RECALLS, side="left")
    return float(np.mean([best[place] if place < len(best) else 0.0 for place in places]))


def _match(threshold: float, ious: Array, truth: list[Box]) -> list[int | None]:
    """Return for each detection the index of the box that it finds, or None. A box is found once, a
    crowd by many; a crowd is found only by what finds no other box."""
    taken: set[int] = set()
    matches: list[int | None] = []
    for row in ious:
        best, match = min(threshold, 1 - 1e-10), None
        for i, box in enumerate(truth):
            if i in taken and not box.crowd:
                continue
            if match is not None and not truth[match].crowd and box.crowd:
                break
            if row[i] >= best:
                best, match = row[i], i
        if match is not None:
            taken.add(match)
        matches.append(match)
    return matches


def _corners(boxes: Sequence[Box]) -> Array:
    """Return upper left and lower right corners, shape [boxes, 4]."""
    rows = [(b.x, b.y, b.x + b.width, b.y + b.height) for b in boxes]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)
