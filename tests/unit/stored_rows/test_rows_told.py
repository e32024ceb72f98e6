"""What became of the rows of a run is in its summary and on its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.commands.launch import PIPELINES
from roll.config import load_config
from roll.data.store.load import RowStore
from roll.data.store.tally import Tally
from roll.output_dir.summary import write_summary
from roll.report.page import page
from roll.report.read import read_runs
from roll.runtime.run_data import RunData
from tests.runs import write_rows_task, write_task


def loaded(path: Path) -> RunData[Any]:
    config = load_config(path).config
    data: RunData[Any] = PIPELINES[config.pipeline].prepare(config)[1]
    return data


def dialogue(number: int, size: int = 1) -> dict[str, Any]:
    turns = [("user", f"{number}+1="), ("assistant", str(number + 1) * size)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def odd(row: dict[str, Any]) -> dict[str, Any] | None:
    """A function of a user that leaves rows out."""
    return row if len(row["messages"]) > 1 else None


@pytest.mark.parametrize("how", ["drop", "cut_end"])
def test_rows_that_are_left_out_are_counted_by_reason(tmp_path: Path, how: str) -> None:
    asked = {"messages": dialogue(1)["messages"][:1]}
    rows = [*map(dialogue, range(6)), dialogue(1, size=100), asked, asked, dialogue(5, size=0)]
    path = write_rows_task(tmp_path, "sft", {"train": rows, "held_out": [dialogue(3)]})
    source = {
        "path": str(tmp_path / "train.jsonl"),
        "fn": "tests.unit.stored_rows.test_rows_told:odd",
    }
    changes = [f"data.sources=[{json.dumps(source)}]", "data.overlap=drop", f"data.too_long={how}"]
    config = load_config(path, changes).config
    train, held = PIPELINES["sft"].prepare(config)[1].rows_told()
    assert held == {"name": "held_out", "validation": True, "read": 1, "kept": 1, "left_out": {}}
    assert train.pop("kept") == (5 if how == "drop" else 6)
    too_long = {"more than 64 tokens": 1} if how == "drop" else {}
    assert train == {
        "name": "train",
        "validation": False,
        "read": 10,
        "left_out": {
            "no row from tests.unit.stored_rows.test_rows_told:odd": 2,
            "an empty answer": 1,
            **too_long,
            "the tokens of a row of a validation set": 1,
        },
    }


def third(row: dict[str, Any]) -> dict[str, Any] | None:
    """A function of a user that keeps two of three rows."""
    return row if int(row["messages"][0]["content"].partition("+")[0]) % 3 else None


def test_rows_that_a_function_leaves_out_are_counted_in_one_part(tmp_path: Path) -> None:
    rows = [dialogue(number) for number in range(300)]
    path = write_rows_task(tmp_path, "sft", {"train": rows, "held_out": rows})
    source = {
        "path": str(tmp_path / "train.jsonl"),
        "fn": "tests.unit.stored_rows.test_rows_told:third",
    }
    sets = {"held_out": {**source, "part": [0.7, 1.0]}}
    changes = [
        f"data.sources=[{json.dumps({**source, 'part': [0.0, 0.7]})}]",
        f"validation.sets={json.dumps(sets)}",
    ]
    config = load_config(path, changes).config
    train, held = PIPELINES["sft"].prepare(config)[1].rows_told()
    assert train["read"] + held["read"] == 300
    assert train["kept"] + held["kept"] == 200
    for part, share in ((train, 0.7), (held, 0.3)):
        [left_out] = part["left_out"].values()
        assert part["read"] == part["kept"] + left_out
        assert abs(left_out - 100 * share) < 15, "three standard deviations of a fair hash"


def test_prompts_that_are_too_long_are_counted_and_others_are_only_told(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]
    rows += [{"prompt": "1+" * 900, "answer": "1"}, {"prompt": "2+2=", "answer": " "}]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    limit = load_config(path).config.model_dump()["data"]["max_prompt_tokens"]
    train = loaded(path).rows_told()[0]
    assert (train["read"], train["kept"]) == (7, 6)
    assert train["left_out"] == {f"more than {limit} tokens": 1}


def test_counts_of_rows_on_disk_are_those_of_rows_in_memory(tmp_path: Path) -> None:
    from roll.config.sections.data import TextDataConfig
    from roll.data.examples import load_texts
    from tests.tiny import char_tokenizer

    path = tmp_path / "t.jsonl"
    rows = [dialogue(i % 50, size=30 * (i % 3)) for i in range(2000)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = {"sources": ({"path": str(path)},), "rows_per_step": 1, "max_tokens": 40}
    data = TextDataConfig.model_validate(told, strict=False)
    store = RowStore(tmp_path / "kept", large_bytes=1, processes=1)
    reports = [
        load_texts(data.sources, data, char_tokenizer(), None, where).report[0]
        for where in (None, store, store)
    ]
    assert reports[0].left_out == reports[1].left_out == reports[2].left_out
    assert sum(reports[0].left_out.values()) + reports[0].kept == reports[0].rows == 2000


def test_parts_of_a_tally_keep_which_rows_stay() -> None:
    from roll.data.chat.unknown_text import UnknownText

    whole, later = Tally(UnknownText(None)), Tally(UnknownText(None))
    whole.dropped.note("a", "f:1")
    later.dropped.note("b", "f:2", stays=True)
    later.dropped.note("a", "f:3")
    whole.add(later)
    again = Tally.from_json(json.loads(json.dumps(whole.to_json())), whole.lengths)
    assert again.left_out == whole.left_out == {"a": 2}
    assert again.dropped.counts == {"a": 2, "b": 1}


def test_the_summary_and_the_page_tell_them(tmp_path: Path) -> None:
    rows = [
        {
            "name": "a",
            "validation": False,
            "read": 9,
            "kept": 7,
            "left_out": {"an empty answer": 2},
        },
        {"name": "b", "validation": True, "read": 3, "kept": 3, "left_out": {}},
    ]
    record = {"step": 0, "time/step_s": 1.0, "reward/mean": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert "rows" not in write_summary(tmp_path, status="finished", wall_s=1.0)
    assert write_summary(tmp_path, status="finished", wall_s=1.0, rows=rows)["rows"] == rows
    shown = page(read_runs([tmp_path]))
    assert "training rows of a" in shown
    assert "7 of 9; left out: 2 with an empty answer" in shown
    assert "validation rows of b" in shown
    summary = json.loads((tmp_path / "summary.json").read_text())
    for damaged in (7, [7, None, {"name": "c"}], [{**rows[0], "left_out": 3}]):
        (tmp_path / "summary.json").write_text(json.dumps(summary | {"rows": damaged}))
        assert "training rows of" not in page(read_runs([tmp_path]))
