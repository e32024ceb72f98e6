"""Pipelines over rows with pictures, some of them broken, in this process."""

from __future__ import annotations

import base64
import json
import logging
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pictures import coloured, file_of
from tests.runs import run_local, without_times, write_rows_task, write_task
from tests.vision_models import save_vision_model

FAMILY = "qwen3_vl"
SIDE = 32
"""Pixels of a side of a token."""


def _picture(number: int) -> bytes:
    """A file whose picture has 1 to 4 tokens."""
    return file_of(coloured(SIDE * (1 + number % 2), SIDE * (1 + number % 3 % 2), seed=number))


def _cut(number: int) -> bytes:
    """A file with a sound header and a damaged end."""
    return file_of(coloured(64, 64, seed=number))[:2000]


def _task(folder: Path, **changes: Any) -> Path:
    """Rows with no picture, one or two; one that is no picture, and two with a damaged end."""
    save_vision_model(folder / "seeing", FAMILY)
    rows = []
    for i in range(20):
        count = i % 3
        pictures = [{"bytes": _picture(3 * i + j), "path": None} for j in range(count)]
        rows.append({"prompt": f"{i}: " + "<image>" * count, "answer": "1", "images": pictures})
    rows[4]["images"] = [{"bytes": b"nothing", "path": None}]
    for i in (7, 13):
        rows[i]["images"] = [{"bytes": _cut(i), "path": None}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    held_out = [*rows[:6], rows[13]]
    pq.write_table(pa.Table.from_pylist(held_out), folder / "held_out.parquet")
    columns = {"images": "images"}
    held_out_source = {"path": str(folder / "held_out.parquet"), "columns": columns}
    return write_task(
        folder,
        **{
            "model": {"path": str(folder / "seeing")},
            "data": {
                "sources": [{"path": str(folder / "train.parquet"), "columns": columns}],
                "prompts_per_step": 5,
                "samples_per_prompt": 2,
                "max_prompt_tokens": 32,
            },
            "sampling": {"max_new_tokens": 4},
            "validation": {"every": 2, "sets": {"held_out": held_out_source}},
            **changes,
        },
    )


def test_a_run_with_broken_pictures_says_which_and_learns_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        records = run_local(_task(tmp_path))
    assert "1 of 20 rows left out because of pictures that cannot be read" in caplog.text
    assert "train.parquet: row 4" in caplog.text
    for name in ("train:7", "train:13", "held_out:6"):
        assert f"{name} is left out" in caplog.text
    steps = records[:-1]
    assert len(steps) == 4
    assert sum(record["pictures/broken_rows"] for record in steps) >= 1
    assert all(record["pictures/rows"] > 0 for record in steps)
    for record in steps:
        assert record["mismatch/logprob_abs_max"] < 1e-4
        assert record["grad_norm"] > 0
    rows = [json.loads(s) for s in (tmp_path / "out/rollouts/step_000000.jsonl").open()]
    shown = {path for row in rows for path in row.get("pictures", ())}
    assert shown
    assert all((tmp_path / "out/rollouts" / path).is_file() for path in shown)
    assert all(row["prompt"].count("<|image_pad|>") == len(row.get("pictures", ())) for row in rows)


def test_a_resumed_run_sees_the_same_pictures(tmp_path: Path) -> None:
    path = _task(
        tmp_path,
        rollout={"max_staleness": 1},
        actor_infer={"pool": "all", "strategy": {"kind": "hf"}},
    )
    whole = run_local(path, [f"output_dir={tmp_path / 'whole'}", "rollout.max_staleness=0"])
    run_local(path, ["max_steps=2", "rollout.max_staleness=0"])
    parts = run_local(path, ["rollout.max_staleness=0"])
    for one, other in zip(whole[2:], parts[2:], strict=True):
        assert without_times(one) == without_times(other)
    # Groups that wait in a checkpoint get their patches again.
    ahead = f"output_dir={tmp_path / 'ahead'}"
    run_local(path, ["max_steps=2", ahead])
    assert run_local(path, [ahead])[-2]["grad_norm"] > 0


def _rows(pairs: bool) -> dict[str, list[dict[str, Any]]]:
    rows = []
    for i in range(12):
        data = _cut(i) if i == 5 else _picture(i)
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        parts: list[Any] = [{"type": "text", "text": f"{i} "}]
        if i % 4:
            parts.append({"type": "image_url", "image_url": {"url": url}})
        asked = [{"role": "user", "content": parts}]
        if pairs:
            rows.append({"prompt": asked, "chosen": "yes", "rejected": "no"})
        else:
            rows.append({"messages": [*asked, {"role": "assistant", "content": f"{i % 4}"}]})
    return {"train": rows, "held_out": rows[:6]}


@pytest.mark.parametrize("pipeline", ["sft", "dpo"])
def test_existing_rows_with_pictures_are_learned(
    tmp_path: Path, pipeline: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_vision_model(tmp_path / "model", FAMILY)
    changes = {"reference": {"pool": "all"}} if pipeline == "dpo" else {}
    path = write_rows_task(tmp_path, pipeline, _rows(pipeline != "sft"), **changes)
    records = run_local(path)
    assert "train:5 is left out" in caplog.text
    first, last = records[0], records[-1]
    assert last["val/held_out/loss"] < first["val/held_out/loss"]
    for record in records[:-1]:
        assert math.isfinite(record["grad_norm"])
        assert record["pictures/rows"] >= 1
