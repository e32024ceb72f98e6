"""Writes detection.json: boxes of images with the average precisions of pycocotools.

pip install pycocotools==2.0.11
python -m tests.golden.make_detection
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

OUT = Path(__file__).with_name("detection.json")
LABELS = ("cat", "dog", "car")


def main() -> None:
    rng = random.Random(0)
    rows = [_image(rng) for _ in range(60)]
    OUT.write_text(json.dumps(rows) + "\n", encoding="utf-8")


def _image(rng: random.Random) -> dict[str, Any]:
    truth = [_box(rng) | {"iscrowd": int(rng.random() < 0.12)} for _ in range(rng.randint(1, 8))]
    truth[0]["iscrowd"] = 0
    found = []
    for box in truth:
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            moved = [max(1.0, round(n + rng.uniform(-6, 6), 1)) for n in box["bbox"]]
            label = box["label"] if rng.random() < 0.9 else rng.choice(LABELS)
            found.append({"bbox": moved, "label": label, "score": rng.choice((0.2, 0.5, 0.9))})
    found += [_box(rng) | {"score": round(rng.random(), 2)} for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.1:
        found = [{k: v for k, v in box.items() if k != "iscrowd"} | {"score": 1.0} for box in truth]
    rng.shuffle(found)
    return {"truth": truth, "found": found, **_evaluated(truth, found)}


def _box(rng: random.Random) -> dict[str, Any]:
    numbers = [rng.uniform(0, 80), rng.uniform(0, 80), rng.uniform(8, 60), rng.uniform(8, 60)]
    return {"bbox": [round(n, 1) for n in numbers], "label": rng.choice(LABELS)}


def _evaluated(truth: list[dict[str, Any]], found: list[dict[str, Any]]) -> dict[str, float]:
    """COCO's AP and AP50 of one image."""
    ids = {label: i + 1 for i, label in enumerate(LABELS)}
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": [{"id": 1}],
            "categories": [{"id": i, "name": label} for label, i in ids.items()],
            "annotations": [
                {
                    "id": i + 1,
                    "image_id": 1,
                    "category_id": ids[box["label"]],
                    "bbox": box["bbox"],
                    "area": box["bbox"][2] * box["bbox"][3],
                    "iscrowd": box["iscrowd"],
                }
                for i, box in enumerate(truth)
            ],
        }
        coco.createIndex()
        results = [
            {"image_id": 1, "category_id": ids[b["label"]], "bbox": b["bbox"], "score": b["score"]}
            for b in found
        ]
        if not results:
            return {"map": 0.0, "ap50": 0.0}
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {"map": float(evaluation.stats[0]), "ap50": float(evaluation.stats[1])}


if __name__ == "__main__":
    main()
