"""Rows that are kept on disk: equal to those in memory, and made only when something changed."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.sections.data import DataConfig, PreferenceDataConfig, TextDataConfig
from roll.config.user_code.import_path import searched_first
from roll.core.errors import CheckpointError, DataError
from roll.data.chat.templates import DatedTokenizer
from roll.data.datasets import Dataset, load_prompts
from roll.data.examples import Example, load_preferences, load_texts
from roll.data.mixing import Sampler
from roll.data.store.load import RowStore
from roll.data.store.rows import Chained, StoredRows
from roll.data.store.users_code import users_code_hash
from tests.full_disk import files_up_to
from tests.tiny import char_tokenizer

FORMATS = ("jsonl", "json", "csv", "parquet", "disk")


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows in the format that the ending names, or that of a folder."""
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(list(rows)))
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)
        case ".disk":
            datasets.Dataset.from_list(list(rows)).save_to_disk(str(path))
    return path


def texts(path: Path, **changes: Any) -> TextDataConfig:
    source = {"path": str(path), "columns": {"messages": None, "prompt": "q", "completion": "a"}}
    told = {"sources": (source,), "rows_per_step": 2, "max_tokens": 40, **changes}
    return TextDataConfig.model_validate(told, strict=False)


def load(data: TextDataConfig, store: RowStore | None) -> Dataset[Example]:
    return load_texts(data.sources, data, char_tokenizer(), None, store)


def kept_in(folder: Path, processes: int = 1) -> RowStore:
    """A store for which every source is large."""
    return RowStore(folder, large_bytes=1, processes=processes)


def sums(count: int) -> list[dict[str, Any]]:
    return [{"q": f"{i}+1=", "a": str(i + 1) * (1 + i % 40)} for i in range(count)]


@pytest.mark.parametrize("form", FORMATS)
def test_rows_on_disk_equal_those_in_memory(form: str, tmp_path: Path) -> None:
    data = texts(write(tmp_path / f"rows.{form}", sums(60)))
    memory, disk = load(data, None), load(data, kept_in(tmp_path / "kept"))
    assert isinstance(disk.sources[0].items, StoredRows)
    assert not isinstance(memory.sources[0].items, StoredRows)
    assert list(disk.items) == list(memory.items)
    assert disk.report == memory.report
    assert 0 < disk.report[0].too_long < len(disk) < 60


@pytest.mark.slow  # of starting processes
def test_several_processes_make_the_same_rows_as_one(tmp_path: Path) -> None:
    rows = [{"q": "say it", "a": "1", "padding": "x" * 9000} for _ in range(300)]  # several chunks
    rows[200]["a"] = "2"
    data = texts(write(tmp_path / "rows.jsonl", rows))
    one = load(data, kept_in(tmp_path / "one"))
    two = load(data, kept_in(tmp_path / "two", processes=2))
    assert list(one.items) == list(two.items)
    assert (one.fingerprint, one.report) == (two.fingerprint, two.report)
    assert [item.id for item in two.items] == [f"rows:{i}" for i in range(300)]


def test_pairs_and_prompts_are_kept_too(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        [
            {
                "prompt": f"{i}+1=",
                "chosen": str(i + 1),
                "rejected": "0",
                "lead": i / 7,
                "tag": f"t{i % 2}",
                "answer": str(i + 1),
                "cases": [{"in": "x" * 20_000}, None],
            }
            for i in range(9)
        ],
    )
    pairs = PreferenceDataConfig.model_validate(
        {"sources": ({"path": str(path), "columns": {"margin": "lead"}},), "rows_per_step": 1},
        strict=False,
    )
    prompts = DataConfig.model_validate(
        {"sources": ({"path": str(path), "columns": {"tag": "tag"}},), "prompts_per_step": 1},
        strict=False,
    )
    tokenizer, store = char_tokenizer(), kept_in(tmp_path / "kept")
    for _ in range(2):
        disk = load_preferences(pairs.sources, pairs, tokenizer, None, store)
        assert list(disk.items) == list(load_preferences(pairs.sources, pairs, tokenizer).items)
        asked = load_prompts(prompts.sources, prompts, tokenizer, store=store)
        memory = load_prompts(prompts.sources, prompts, tokenizer)
        assert asked.tags == memory.tags == {"t0": 5, "t1": 4}
        for found, expected in zip(asked.items, memory.items, strict=True):
            assert dict(found.extra) == dict(expected.extra)
            assert (found.id, found.tokens, found.text, found.answer, found.tag) == (
                expected.id,
                expected.tokens,
                expected.text,
                expected.answer,
                expected.tag,
            )
    assert len([each for each in (tmp_path / "kept").iterdir() if each.is_dir()]) == 2


def test_prompts_with_columns_that_json_does_not_hold_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["1+1="], "answer": ["2"], "blob": [b"\x00"]}), path)
    data = DataConfig.model_validate(
        {"sources": ({"path": str(path)},), "prompts_per_step": 1}, strict=False
    )
    kept = load_prompts(data.sources, data, char_tokenizer(), store=kept_in(tmp_path / "kept"))
    assert kept.items[0].extra == {"blob": b"\x00"}
    assert not [each for each in (tmp_path / "kept").iterdir() if each.is_dir()]


def test_rows_are_made_again_only_when_they_would_be_others(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", sums(20))
    store = kept_in(tmp_path / "kept")

    def made() -> int:
        return len([each for each in store.folder.iterdir() if each.is_dir()])  # type: ignore[union-attr]

    first = load(texts(path), store)
    assert load(texts(path), store).fingerprint == first.fingerprint
    load(texts(path, rows_per_step=1, shuffle=False), store)
    path.touch()
    load(texts(path), store)
    assert made() == 1
    load(texts(path, max_tokens=30), store)
    assert made() == 2
    tokenizer = char_tokenizer()
    tokenizer.chat_template = f"1{tokenizer.chat_template}"
    load_texts(texts(path).sources, texts(path), tokenizer, None, store)
    assert made() == 3
    write(path, [*sums(19), {"q": "19+1=", "a": "x"}])
    changed = load(texts(path), store)
    assert made() == 4
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ('{% if strftime_now is defined %}{{ strftime_now("%d %b %Y") }}{% endif %}', (1, 1, 2)),
        ("{{ strftime_now( '%H' ) }}{{ strftime_now('%Y') }}", (1, 2, 3)),
        ('{% set day = "%d" %}{{ strftime_now(day) }}', (1, 2, 3)),
        ("{% set now = strftime_now %}{{ now('%d') }}{{ strftime_now('%d') }}", (1, 2, 3)),
        ("", (1, 1, 1)),
    ],
)
def test_rows_of_a_template_with_the_date_are_kept_as_long_as_the_date_is_the_same(
    tmp_path: Path, template: str, made: Sequence[int]
) -> None:
    data = texts(write(tmp_path / "rows.jsonl", sums(3)), chat_template=False)
    tokenizer, store = char_tokenizer(), kept_in(tmp_path / "kept")
    tokenizer.chat_template = template
    found = []
    for moment in ((2026, 1, 5, 9, 0, 1), (2026, 1, 5, 23, 30, 2), (2026, 1, 6, 2)):
        dated = DatedTokenizer(tokenizer, datetime(*moment))
        load_texts(data.sources, data, dated, None, store)
        found.append(len([each for each in (tmp_path / "kept").iterdir() if each.is_dir()]))
    assert tuple(found) == tuple(made)


def test_code_that_a_function_imports_is_part_of_the_key(tmp_path: Path) -> None:
    code = {
        "beside/rows_fn_7.py": "from shared_7 import tools\n\ndef row(columns):\n"
        "    import json, torch\n    from late_7.deep import inner\n    return columns\n",
        "lib/shared_7/__init__.py": "",
        "lib/shared_7/tools.py": "from . import more\n",
        "lib/shared_7/more.py": "import nowhere_7\n",
        "lib/late_7/__init__.py": "",
        "lib/late_7/deep.py": "inner = 1\n",
        "lib/other_7.py": "",
    }
    for name, text in code.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "lib/nowhere_7.py").write_text("")
    with searched_first(tmp_path / "lib"), searched_first(tmp_path / "beside"):
        before = users_code_hash("rows_fn_7:row")
        assert users_code_hash("rows_fn_7:row") == before
        for name in code:
            (tmp_path / name).write_text(f"{code[name]}# changed\n")
            assert (users_code_hash("rows_fn_7:row") == before) == ("other" in name), name
            (tmp_path / name).write_text(code[name])
        assert users_code_hash("rows_fn_7:row") == before


def test_rows_without_a_folder_leave_nothing_behind(tmp_path: Path) -> None:
    data = texts(write(tmp_path / "rows.jsonl", sums(30)))
    kept, gone = load(data, kept_in(tmp_path / "kept")), load(data, RowStore(None, 1, 1))
    rows = gone.sources[0].items
    assert isinstance(rows, StoredRows)
    assert not rows.folder.exists()
    assert list(rows) == list(kept.items)
    assert gone.fingerprint == kept.fingerprint
    assert [row.id for row in rows.with_prefix("val/rows")][:2] == ["val/rows:0", "val/rows:1"]
    fewer = rows.without([0, 2]).without([1]).with_prefix("x")
    assert [row.sequences for row in fewer] == [
        rows[i].sequences for i in (1, *range(4, len(rows)))
    ]
    assert len(fewer.hashes) == len(fewer) == len(rows) - 3


def test_a_run_resumes_in_the_middle_of_an_epoch_with_and_without_the_folder(
    tmp_path: Path,
) -> None:
    data = texts(write(tmp_path / "rows.jsonl", sums(30)))
    kept, gone = load(data, kept_in(tmp_path / "kept")), load(data, RowStore(None, 1, 1))
    whole, begun = Sampler(gone, seed=3), Sampler(gone, seed=3)
    expected = [next(whole) for _ in range(80)]
    for item in expected[:17]:
        assert next(begun) == item
        begun.settle(item)
    resumed = Sampler(load(data, kept_in(tmp_path / "kept")), seed=3)
    state = json.loads(json.dumps(begun.state()))
    resumed.restore(state, kept.find)
    assert [next(resumed) for _ in range(63)] == expected[17:]


def test_a_row_is_found_by_its_id(tmp_path: Path) -> None:
    data = texts(write(tmp_path / "rows.jsonl", sums(60)))
    for loaded in (load(data, None), load(data, kept_in(tmp_path / "kept"))):
        for item in loaded.items:
            assert loaded.find(item.id) == item
        left_out = {f"rows:{i}" for i in range(60)} - {item.id for item in loaded.items}
        for row_id in (*left_out, "rows:60", "rows:", "rows:-1", "other:1"):
            with pytest.raises(CheckpointError, match="names row"):
                loaded.find(row_id)


@given(st.lists(st.lists(st.integers()), max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_chained_rows_behave_as_their_list(parts: list[list[int]], data: st.DataObject) -> None:
    chained, whole = Chained(parts), [each for part in parts for each in part]
    assert list(chained) == whole
    assert len(chained) == len(whole)
    at = data.draw(st.integers(-len(whole) - 2, len(whole) + 2))
    try:
        expected = whole[at]
    except IndexError:
        with pytest.raises(IndexError):
            chained[at]
    else:
        assert chained[at] == expected
    assert chained[at : at + 3] == whole[at : at + 3]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_wrong_row_is_named_with_its_line_by_any_process(processes: int, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*sums(50), {"q": 5, "a": "x"}])
    with pytest.raises(DataError, match=r"rows.jsonl:51: column 'q' must be text"):
        load(texts(path), kept_in(tmp_path / "kept", processes))
    assert not [each for each in (tmp_path / "kept").iterdir() if each.is_dir()]


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    data = texts(write(tmp_path / "rows.jsonl", sums(200)))
    with files_up_to(4096), pytest.raises(DataError, match=r"cannot be kept in .* `data.cache`"):
        load(data, kept_in(tmp_path / "kept"))
    assert not [each for each in (tmp_path / "kept").iterdir() if each.is_dir()]
    assert len(load(data, kept_in(tmp_path / "kept"))) > 0


def test_broken_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    data, store = texts(write(tmp_path / "rows.jsonl", sums(30))), kept_in(tmp_path / "kept")
    rows = load(data, store).sources[0].items
    assert isinstance(rows, StoredRows)
    whole = (rows.folder / "rows.arrow").read_bytes()
    (rows.folder / "rows.arrow").write_bytes(whole[:-40])
    with pytest.raises(DataError, match="remove this folder"):
        load(data, store)
