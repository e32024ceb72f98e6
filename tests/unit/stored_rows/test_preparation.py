"""Functions and templates of the user, parts by hash, and overlap with validation sets."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from roll.config.sections.data import DataConfig, SourceConfig, TextDataConfig
from roll.core.errors import ConfigError, DataError
from roll.core.types import Message, Prompt
from roll.data.columns import RawRow, map_row
from roll.data.datasets import Dataset, content_of, identity, load_prompts
from roll.data.examples import load_texts
from roll.data.preparation.overlap import overlaps, without_overlap
from roll.data.preparation.parts import lies_in
from roll.data.sources import check_source
from roll.data.store.load import RowStore
from roll.data.store.rows import StoredRows
from tests.tiny import char_tokenizer


def halved(row: dict[str, Any]) -> Any:
    """Two rows of an even number, none of an odd one, an error for 13."""
    number = int(row["prompt"].removesuffix("+1="))
    if number == 13:
        raise KeyError("thirteen")  # the line that the message shows
    if number % 2:
        return None
    return [{**row, "prompt": f"{number}-{i}="} for i in range(2)] if number else row


def wrong(row: dict[str, Any]) -> Any:
    return [row, "text"]


def renamed(row: dict[str, Any]) -> Any:
    return {"prompt": row["frage"], "answer": row["antwort"]}


HERE = "tests.unit.stored_rows.test_preparation"


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def sums(numbers: Sequence[int]) -> list[dict[str, str]]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in numbers]


def prompts(sources: list[dict[str, Any]], store: RowStore | None = None) -> Dataset[Prompt]:
    data = DataConfig.model_validate({"sources": sources, "prompts_per_step": 1}, strict=False)
    return load_prompts(data.sources, data, char_tokenizer(), store=store)


@pytest.fixture(params=["memory", "disk", "no folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RowStore | None:
    folder = tmp_path / "kept" if request.param == "disk" else None
    kept = RowStore(folder, large_bytes=1, processes=1)
    return None if request.param == "memory" else kept


def test_a_function_leaves_rows_out_and_makes_several_of_one(
    store: RowStore | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", sums(range(6)))
    loaded = prompts([{"path": path, "fn": f"{HERE}:halved"}], store)
    texts = ["0+1=", "2-0=", "2-1=", "4-0=", "4-1="]
    assert [each.text for each in loaded.items] == [f"<user>{text}<assistant>" for text in texts]
    assert [each.id for each in loaded.items] == [f"a:{i}" for i in range(5)]
    (report,) = loaded.report
    assert report.remarks == (f"3 with no row from {HERE}:halved (first: {path}:2)",)
    assert (report.kept, report.rows) == (5, 8)


def test_an_error_of_a_function_names_row_and_line(store: RowStore | None, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", sums(range(20)))
    told = r"a.jsonl:14: .*:halved raised KeyError: 'thirteen' .*:\d+: raise KeyError"
    with pytest.raises(DataError, match=told):
        prompts([{"path": path, "fn": f"{HERE}:halved"}], store)
    with pytest.raises(DataError, match=r"a.jsonl:1: .*must return a row .* found str 'text'"):
        prompts([{"path": path, "fn": f"{HERE}:wrong"}], store)
    with pytest.raises(ConfigError, match="no module named"):
        prompts([{"path": path, "fn": "nowhere:row"}], store)
    odd = write(tmp_path / "odd.jsonl", sums([1]))
    with pytest.raises(DataError, match="none of 1 rows is left"):
        prompts([{"path": odd, "fn": f"{HERE}:halved"}], store)


def test_columns_are_those_that_the_function_returns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"frage": "1+1=", "antwort": 2}])
    source = SourceConfig(path=path, fn=f"{HERE}:renamed")
    check_source(source)
    assert prompts([source.model_dump()]).items[0].answer == "2"


def test_a_text_and_turns_are_made_of_columns() -> None:
    row = RawRow("here", {"q": "1+1=", "unit": "m", "rules": "", "n": 3, "answer": "2"})
    told = {"path": "x", "columns": {"prompt": "{{in {unit}}} {q} {n}", "answer": "{answer}{unit}"}}
    mapped = map_row(row, SourceConfig.model_validate(told, strict=False))
    assert (mapped.prompt, mapped.answer) == ("{in m} 1+1= 3", "2m")
    assert mapped.extra == row.values
    turns = [
        {"role": "system", "content": "{rules}"},
        {"role": "user", "content": "{q} in {unit}"},
    ]
    told = {"path": "x", "columns": {"prompt": None, "messages": turns}}
    source = SourceConfig.model_validate(told, strict=False)
    assert map_row(row, source).messages == (Message(role="user", content="1+1= in m"),)
    assert source.columns_used == ("rules", "q", "unit", "answer")
    with pytest.raises(DataError, match=r"column 'q', which '\{q\} in \{unit\}' names, must"):
        map_row(RawRow("here", {**row.values, "q": None}), source)
    with pytest.raises(DataError, match=r"no column 'unit'"):
        map_row(RawRow("here", {"q": "", "rules": "", "answer": ""}), source)


def test_texts_to_imitate_are_made_of_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": "1+1=", "a": "2"}])
    turns = [{"role": "user", "content": "{q}"}, {"role": "assistant", "content": "so {a}"}]
    tokens = []
    for columns in (
        {"messages": turns},
        {"messages": None, "prompt": "{q}", "completion": "so {a}"},
    ):
        data = TextDataConfig.model_validate(
            {"sources": ({"path": path, "columns": columns},), "rows_per_step": 1}, strict=False
        )
        tokens.append(load_texts(data.sources, data, char_tokenizer()).items[0].sequences)
    assert tokens[0] == tokens[1]
    assert char_tokenizer().decode(list(tokens[0][0].tokens)).count("so 2") == 1


@pytest.mark.parametrize("text", ["{", "a {b", "{}", "{a.b}x{c!r}", "{a:>3}"])
def test_braces_with_more_than_a_column_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="brace"):
        SourceConfig.model_validate({"path": "x", "columns": {"prompt": text}})


@given(st.lists(st.text(min_size=1), unique=True), st.floats(0, 1))
def test_parts_are_disjoint_and_leave_nothing_out(texts: list[str], cut: float) -> None:
    for text in texts:
        asked = (Message(role="user", content=text),)
        assert lies_in((0, cut), asked) != lies_in((cut, 1), asked)
        answered = (Message(role="system", content="x"), *asked, Message("assistant", "y"))
        assert lies_in((0, cut), answered) == lies_in((0, cut), asked)


def test_a_row_keeps_its_part_when_others_are_added(store: RowStore | None, tmp_path: Path) -> None:
    def part(numbers: range, low: float, high: float) -> set[str]:
        path = write(tmp_path / "a.jsonl", sums(numbers))
        return {each.text for each in prompts([{"path": path, "part": [low, high]}], store).items}

    train, held = part(range(300), 0, 0.8), part(range(300), 0.8, 1)
    assert not train & held
    assert len(train | held) == 300
    assert 30 <= len(held) <= 90
    assert held <= part(range(600), 0.8, 1)
    assert part(range(600), 0.8, 1) & train == set()


def test_a_part_in_which_no_row_lies_is_named(store: RowStore | None, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", sums(range(3)))
    says = r"a\.jsonl: none of 3 rows lies in part \[0\.0, 1e-09\]; widen it"
    with pytest.raises(DataError, match=says):
        prompts([{"path": path, "part": [0, 1e-9]}], store)


def overlapping(store: RowStore | None, folder: Path) -> tuple[Dataset[Prompt], Dataset[Prompt]]:
    train = write(folder / "train.jsonl", sums([1, 2, 3, 2, 4]))
    held = write(folder / "held.jsonl", sums([9, 2, 3]))
    return prompts([{"path": train}], store), prompts([{"path": held}], store)


def test_rows_that_are_held_out_too_are_named(
    store: RowStore | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train, held = overlapping(store, tmp_path)
    (found,) = overlaps(train, held, content_of)
    assert (found.rows, found.places, found.first) == (2, (1, 2, 3), ("train:1", "held:1"))
    with caplog.at_level(logging.WARNING):
        assert without_overlap(train, held, "warn", content_of, identity) is train
    assert "2 rows of validation set held are in training source train" in caplog.text
    with pytest.raises(DataError, match="held:1 is train:1"):
        without_overlap(train, held, "refuse", content_of, identity)


def test_rows_that_are_held_out_too_are_left_out(store: RowStore | None, tmp_path: Path) -> None:
    train, held = overlapping(store, tmp_path)
    kept = without_overlap(train, held, "drop", content_of, identity)
    assert [each.id for each in kept.items] == ["train:0", "train:4"]
    assert kept.items[1] == train.items[4] == kept.find("train:4")
    assert kept.tags == {"default": 2}
    assert kept.fingerprint != train.fingerprint
    assert isinstance(kept.sources[0].items, StoredRows) == (store is not None)
    assert overlaps(kept, held, content_of) == []
    assert [
        each.id for each in without_overlap(kept, held, "drop", content_of, identity).items
    ] == [each.id for each in kept.items]
    with pytest.raises(DataError, match="all of its rows"):
        without_overlap(train, train, "drop", content_of, identity)
