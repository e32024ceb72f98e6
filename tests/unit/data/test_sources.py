"""Reading rows from every format, and what is said about broken files."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll.config.sections.data import ColumnsConfig, SourceConfig
from roll.core.errors import DataError, NotMadeYetError
from roll.data.columns import map_row
from roll.data.sources import check_source, read_source

ROWS = [
    {"prompt": "1 + 1", "answer": "2", "level": "easy"},
    {"prompt": "2 * 3", "answer": "6", "level": "hard"},
]


def _jsonl(path: Path, *lines: str) -> SourceConfig:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return SourceConfig(path=str(path))


def _fails(source: SourceConfig, *parts: str, error: type[DataError] = DataError) -> None:
    """Both the quick check and the full reading complain, in the same words."""
    for read in (check_source, partial(read_source, map_one=map_row)):
        with pytest.raises(error) as raised:
            read(source)
        for part in parts:
            assert part in str(raised.value)


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.csv").write_text("prompt,answer,level\n1 + 1,2,easy\n2 * 3,6,hard\n")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "plain")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    splits.save_to_disk(tmp_path / "split")
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "plain", "split"):
        source = SourceConfig(path=str(tmp_path / name), tag="sums")
        check_source(source)
        rows = read_source(source, map_row)
        assert [(r.prompt, r.answer, r.tag, r.extra) for r in rows] == [
            ("1 + 1", "2", "sums", {"level": "easy"}),
            ("2 * 3", "6", "sums", {"level": "hard"}),
        ], name


def test_columns_are_mapped_and_the_rest_is_kept_as_extra(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}], "truth": 7, "kind": "chat", "id": "x"}
    path.write_text(
        json.dumps(row) + "\n" + json.dumps(row | {"messages": json.dumps(row["messages"])})
    )
    columns = ColumnsConfig(prompt=None, messages="messages", answer="truth", tag="kind")
    for got in read_source(SourceConfig(path=str(path), columns=columns), map_row):
        assert got.messages is not None
        assert [(m.role, m.content) for m in got.messages] == [("user", "hi")]
        assert (got.answer, got.tag, got.extra) == ("7", "chat", {"id": "x"})


def test_limit_takes_the_first_rows_and_never_reads_the_broken_ones_after(tmp_path: Path) -> None:
    source = _jsonl(tmp_path / "a.jsonl", json.dumps(ROWS[0]), "{broken")
    assert len(read_source(source.model_copy(update={"limit": 1}), map_row)) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x", "answer": }', "not valid JSON"),
        ("[1, 2]", "expected an object"),
        ('{"prompt": 3, "answer": "2"}', "column 'prompt' must be text, found int 3"),
        ('{"promt": "x", "answer": "2"}', "no column 'prompt'; did you mean 'promt'?"),
        ('{"prompt": "x", "answer": null}', "column 'answer' must be text or a number"),
        ('{"prompt": "x", "answer": [1]}', "found list [1]"),
        ('{"prompt": " ", "answer": "1"}', "column 'prompt' is empty"),
        ('{"prompt": "x", "answer": "1", "answer": "2"}', "the key 'answer' comes more than once"),
        ('{"prompt": "x", "a": [{"b": 1, "b": 1}]}', "the key 'b' comes more than once"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, line: str, says: str) -> None:
    good = json.dumps(ROWS[0])
    path = tmp_path / "a.jsonl"
    with pytest.raises(DataError) as raised:
        read_source(_jsonl(path, good, "", line), map_row)
    assert f"{path}:3" in str(raised.value)
    assert says in str(raised.value)
    _fails(_jsonl(path, line), f"{path}:1", says)


def test_text_that_is_not_utf8_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(ROWS[0]).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8"):
        read_source(SourceConfig(path=str(path)), map_row)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("not json", "is text but not JSON"),
        ([], "must be a list of {role, content}"),
        (["hi"], "[0] must be {role, content}"),
        ([{"role": "user"}], "[0].content must be text, found nothing"),
    ],
)
def test_malformed_messages_are_explained(tmp_path: Path, messages: object, says: str) -> None:
    source = _jsonl(tmp_path / "a.jsonl", json.dumps({"messages": messages, "answer": "1"}))
    columns = ColumnsConfig(prompt=None, messages="messages")
    _fails(source.model_copy(update={"columns": columns}), "a.jsonl:1", says)


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    _jsonl(tmp_path / "train.jsonl", json.dumps(ROWS[0]))
    _fails(SourceConfig(path=str(tmp_path / "trian.jsonl")), "no such file", "'train.jsonl'")


def test_a_file_that_a_command_makes_is_told_apart(tmp_path: Path) -> None:
    path = str(tmp_path / "later.jsonl")
    source = SourceConfig(path=path, made_by="python make.py")
    _fails(source, path, "python make.py", error=NotMadeYetError)


def test_empty_sources_are_errors(tmp_path: Path) -> None:
    _fails(_jsonl(tmp_path / "a.jsonl"), "no rows")
    (tmp_path / "a.json").write_text("[]")
    _fails(SourceConfig(path=str(tmp_path / "a.json")), "no rows")
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    _fails(SourceConfig(path=str(tmp_path / "a.csv")), "no rows")
    table = pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())})
    pq.write_table(table, tmp_path / "a.parquet")
    _fails(SourceConfig(path=str(tmp_path / "a.parquet")), "no rows")


def test_a_wrong_format_is_explained(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    _fails(SourceConfig(path=str(tmp_path / "a.txt")), "unknown ending '.txt'", "set `format`")
    (tmp_path / "a.parquet").write_text("PAR1 no")
    _fails(SourceConfig(path=str(tmp_path / "a.parquet")), "not a readable Parquet file")
    (tmp_path / "a.json").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    _fails(SourceConfig(path=str(tmp_path / "a.json")), "set `format: jsonl`")
    (tmp_path / "a.csv").write_text("prompt,answer\nx\n")
    _fails(SourceConfig(path=str(tmp_path / "a.csv")), "row 0 (line 2)", "2 columns")
    (tmp_path / "a.csv").write_text("prompt,answer,prompt,,\nx,y,z,,\n")
    _fails(SourceConfig(path=str(tmp_path / "a.csv")), "the column 'prompt' more than once")
    for values in ('"answer": "1", "answer": "2"', '"answer": ' + "9" * 5000):
        (tmp_path / "a.json").write_text(f'[{{"prompt": "x", {values}}}]')
        _fails(SourceConfig(path=str(tmp_path / "a.json")), "a.json: JSON that cannot be read")
    _fails(SourceConfig(path=str(tmp_path)), "datasets.save_to_disk")
    _fails(SourceConfig(path=str(tmp_path), format="jsonl"), "is a folder")


def test_missing_parquet_columns_and_splits_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["x"], "answer": ["y"]}), tmp_path / "a.parquet")
    _fails(SourceConfig(path=str(tmp_path / "a.parquet")), "no column 'prompt'", "question")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "d")
    _fails(SourceConfig(path=str(tmp_path / "d"), split="trian"), "did you mean 'train'")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "plain"])
def test_a_split_or_subset_of_local_rows_that_have_none_is_refused(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]))
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.csv").write_text("prompt,answer\n1 + 1,2\n")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "plain")
    _fails(SourceConfig(path=str(tmp_path / name), split="test"), name, "`split: test`", "drop")
    _fails(SourceConfig(path=str(tmp_path / name), subset="main"), name, "`subset: main`", "null")


def test_a_subset_of_a_folder_of_splits_is_refused(tmp_path: Path) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path)
    check_source(SourceConfig(path=str(tmp_path), split="test"))
    _fails(SourceConfig(path=str(tmp_path), split="test", subset="main"), "`subset: main`")


def test_a_hub_dataset_out_of_reach_says_what_to_check() -> None:
    source = SourceConfig(path="no-such-org/no-such-set", split="test")
    check_source(source)
    with pytest.raises(DataError, match=r"no-such-org/no-such-set.*'test'.*network"):
        read_source(source, map_row)


def test_the_quick_check_imports_nothing_heavy(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", json.dumps(ROWS[0]))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    program = (
        "import sys\n"
        "from roll.config.sections.data import SourceConfig\n"
        "from roll.data.sources import check_source\n"
        "for path in sys.argv[1:]: check_source(SourceConfig(path=path))\n"
        "heavy = {'torch', 'datasets', 'transformers', 'ray'} & sys.modules.keys()\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)\n"
    )
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "a.parquet")]
    done = subprocess.run(
        [sys.executable, "-c", program, *paths],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
