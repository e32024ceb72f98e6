"""Boxes of objects: COCO's numbers, and measures that superfluous boxes cannot raise."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.errors import DataError
from roll.rewards.contract import sample_of
from roll.rewards.detection.boxes import Box
from roll.rewards.detection.coco import iou_matrix
from roll.rewards.detection.reward import detection_reward

ROWS = json.loads((Path(__file__).parents[2] / "golden" / "detection.json").read_text())
COCO: dict[str, Any] = {"box": "bbox", "coordinates": "xywh"}
TWO = [
    {"bbox_2d": [0, 0, 10, 10], "label": "cat"},
    {"bbox_2d": [20, 20, 40, 40], "label": "dog"},
]


def _parts(response: object, truth: object, **options: Any) -> dict[str, float]:
    text = response if isinstance(response, str) else json.dumps(response)
    return detection_reward(sample_of(text, answer=json.dumps(truth)), **options).parts


def test_average_precisions_are_those_of_pycocotools() -> None:
    assert len(ROWS) == 60
    assert sum(0 < row["map"] < 1 for row in ROWS) > 40
    for row in ROWS:
        parts = _parts(row["found"], row["truth"], **COCO)
        assert parts["map"] == pytest.approx(row["map"], abs=1e-9), row
        assert parts["ap50"] == pytest.approx(row["ap50"], abs=1e-9), row


def test_the_iou_of_boxes_is_that_of_their_cells() -> None:
    def cells(box: Box) -> set[tuple[int, int]]:
        xs = range(int(box.x), int(box.x + box.width))
        return {(x, y) for x in xs for y in range(int(box.y), int(box.y + box.height))}

    boxes = [Box(0, 0, 4, 4, "a"), Box(2, 1, 4, 6, "a"), Box(9, 9, 1, 1, "a"), Box(1, 1, 2, 2, "a")]
    ious = iou_matrix(boxes, boxes)
    for i, one in enumerate(boxes):
        for j, other in enumerate(boxes):
            a, b = cells(one), cells(other)
            assert ious[i, j] == pytest.approx(len(a & b) / len(a | b))


def test_the_right_boxes_score_one_in_any_order() -> None:
    assert set(_parts(TWO, TWO).values()) == {1.0}
    assert set(_parts(TWO[::-1], TWO).values()) == {1.0}
    fenced = f"Here they are:\n```json\n{json.dumps(TWO)}\n```"
    assert set(_parts(fenced, TWO).values()) == {1.0}


def test_missing_and_superfluous_boxes_cost() -> None:
    assert _parts(TWO[:1], TWO)["iou"] == 0.5
    assert _parts(TWO[:1], TWO)["count"] == 0.5
    many = TWO + [{"bbox_2d": [i, 50, i + 5, 60], "label": "car"} for i in range(8)]
    found = _parts(many, TWO)
    assert found["map"] == 1.0  # as COCO has it: the image has no cars
    assert (found["iou"], found["count"]) == pytest.approx((0.2, 0.2))
    assert _parts(TWO[:1] * 50, TWO)["iou"] == pytest.approx(1 / 50)


def test_labels_count_unless_they_are_ignored() -> None:
    swapped = [{**TWO[0], "label": "dog"}, {**TWO[1], "label": "cat"}]
    assert _parts(swapped, TWO)["iou"] == 0.0
    assert _parts(swapped, TWO, labels=False)["iou"] == 1.0
    unlabelled = [{"bbox_2d": box["bbox_2d"]} for box in TWO]
    assert _parts(unlabelled, TWO, labels=False)["map"] == 1.0
    assert _parts([{**TWO[0], "label": " Cat "}], TWO[:1])["iou"] == 1.0


def test_an_image_without_objects_wants_an_empty_list() -> None:
    assert set(_parts([], []).values()) == {1.0}
    assert _parts(TWO, [])["iou"] == _parts(TWO, [])["map"] == 0.0
    assert _parts([], TWO) == {"iou": 0, "map": 0, "ap50": 0, "count": 0, "format": 1}


INVALID = [
    "",
    "[" * 5000,
    "no boxes",
    "{}",
    '[{"bbox_2d": [0, 0, NaN, 10], "label": "cat"}]',
    '[{"bbox_2d": [0, 0, 1e999, 10], "label": "cat"}]',
    '[{"bbox_2d": [0, 0, "10", 10], "label": "cat"}]',
    '[{"bbox_2d": [0, 0, true, 10], "label": "cat"}]',
    '[{"bbox_2d": [10, 10, 0, 0], "label": "cat"}]',
    '[{"bbox_2d": [0, 0, 10], "label": "cat"}]',
    '[{"bbox_2d": [0, 0, 10, 10], "label": ""}]',
    '[{"bbox_2d": [0, 0, 10, 10]}]',
    "[1]",
    json.dumps(TWO[:1] * 1001),
    "<think>" + json.dumps(TWO),
]


@pytest.mark.parametrize("response", INVALID, ids=range(len(INVALID)))
def test_an_invalid_list_scores_nothing(response: str) -> None:
    assert set(_parts(response, TWO).values()) == {0.0}


def test_the_measure_is_the_score_and_a_wrong_row_is_told() -> None:
    sample = sample_of(json.dumps(TWO[:1]), answer="", extra={"objects": TWO, "bad": [1]})
    for measure, score in (("iou", 0.5), ("count", 0.5), ("format", 1.0)):
        found = detection_reward(sample, truth="objects", measure=measure)  # type: ignore[arg-type]
        assert found.score == score
    with pytest.raises(DataError, match="column 'bad' has no boxes"):
        detection_reward(sample, truth="bad")


def test_many_boxes_take_no_long_time() -> None:
    many = [{"bbox_2d": [i % 7, 0, 10 + i % 5, 10], "label": "cat"} for i in range(1000)]
    before = time.process_time()
    _parts(many, many[:200])
    assert time.process_time() - before < 6


NUMBERS = st.floats(-50, 50) | st.integers(-50, 50)
BOXES = st.lists(
    st.fixed_dictionaries(
        {"bbox_2d": st.lists(NUMBERS, min_size=4, max_size=4), "label": st.just("cat")}
    ),
    max_size=4,
)


@given(st.text(max_size=60) | BOXES.map(json.dumps))
@settings(deadline=None)
def test_no_response_fails(response: str) -> None:
    assert all(0 <= part <= 1 + 1e-9 for part in _parts(response, TWO).values())
