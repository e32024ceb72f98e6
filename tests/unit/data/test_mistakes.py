"""All mistakes in the rows of a file are told at once, with the number of rows that have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.commands.data.look import look_at
from roll.commands.trials.trial import try_data
from roll.config.loading.compose import load_config
from roll.config.sections.data import DataConfig, SourceConfig, TextDataConfig, TextSource
from roll.core.errors import RowError
from roll.data.columns import map_row
from roll.data.datasets import load_prompts
from roll.data.examples import ExampleMaker, load_texts, texts_of
from roll.data.preparation.mistakes import SHOWN, Mistakes
from roll.data.sources import check_source, read_source
from roll.data.store.chunks import RowsChunk, chunks_of
from roll.data.store.load import RowStore
from roll.data.store.workers import parts
from tests.runs import write_rows_task
from tests.tiny import char_tokenizer

GOOD = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
LINES = [
    json.dumps(GOOD),
    "{broken",
    json.dumps({"messages": "no list"}),
    json.dumps(GOOD),
    json.dumps({"message": []}),
    "[1]",
    json.dumps({"message": []}),
    json.dumps({"messages": [{"role": "user", "content": 3}]}),
    json.dumps(GOOD),
    json.dumps({"message": []}),
]


HALF = "1+\ud83d="


def test_half_of_a_surrogate_pair_is_a_mistake_of_its_row(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": HALF}, *GOOD["messages"][1:]]}
    told = {"messages": [GOOD["messages"][0], {"role": "assistant", "content": HALF}]}
    lines = [json.dumps(row) for row in (GOOD, asked, told, GOOD)]
    path = write(tmp_path / "t.jsonl", lines)
    says = r"2 of 4 rows have mistakes:\n.*:2: the text has half of a surrogate pair \('\\ud83d' .*"
    data = TextDataConfig(sources=(TextSource(path=str(path)),), rows_per_step=1)
    with pytest.raises(RowError, match=says):
        load_texts(data.sources, data, char_tokenizer())
    row = {"prompt": HALF, "answer": HALF}
    path = write(tmp_path / "p.jsonl", [json.dumps({**row, "prompt": "1"}), json.dumps(row)])
    for rendered in (True, False):
        prompts = DataConfig(
            sources=(SourceConfig(path=str(path)),), prompts_per_step=1, chat_template=rendered
        )
        with pytest.raises(RowError, match=r"p\.jsonl:2: the text has half of a surrogate pair"):
            load_prompts(prompts.sources, prompts, char_tokenizer())


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def told_of(path: Path) -> str:
    """The error for `LINES`."""
    return (
        f"{path}: 7 of 10 rows have mistakes:\n"
        f"  {path}:2: not valid JSON: Expecting property name enclosed in double quotes at column 2"
        ": '{broken'\n"
        f"  {path}:3: column 'messages' is text but not JSON: Expecting value\n"
        f"  {path}:5: no column 'messages'; did you mean 'message'? (columns: message); set "
        "`columns` of this source (the same in line 7, line 10)\n"
        f'  {path}:6: expected an object like {{"prompt": ...}}, found list\n'
        f"  {path}:8: column 'messages'[0].content must be text, found int 3"
    )


def texts(path: Path, **changes: Any) -> TextDataConfig:
    told = {"sources": ({"path": str(path)},), "rows_per_step": 1, **changes}
    return TextDataConfig.model_validate(told, strict=False)


@pytest.mark.parametrize("processes", [None, 1, 2])
def test_mistakes_of_all_kinds_are_told_in_one_error(tmp_path: Path, processes: int | None) -> None:
    path = write(tmp_path / "t.jsonl", LINES)
    store = None if processes is None else RowStore(tmp_path / "kept", 1, processes)
    data = texts(path)
    with pytest.raises(RowError) as raised:
        load_texts(data.sources, data, char_tokenizer(), None, store)
    assert str(raised.value) == told_of(path)
    assert store is None or not [each for each in (tmp_path / "kept").iterdir() if each.is_dir()]


def test_commands_tell_all_mistakes_as_a_run_does(tmp_path: Path) -> None:
    path = write_rows_task(tmp_path, "sft", {"train": [GOOD], "held_out": [GOOD]})
    rows = write(tmp_path / "train.jsonl", LINES)
    config = load_config(path).config
    with pytest.raises(RowError) as raised:
        look_at(config, rows=1)
    assert str(raised.value) == told_of(rows)
    [wrong] = try_data(config).wrong
    assert str(wrong) == told_of(rows)
    check_source(config.sources[0])  # only a look at the first row
    write(rows, LINES[1:] + LINES[:1])
    with pytest.raises(RowError, match="7 of 10 rows have mistakes"):
        check_source(config.sources[0])


def test_more_mistakes_than_are_told_are_counted(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": i, "answer": "2"}) for i in range(SHOWN + 3)]
    lines += [json.dumps({"prompt": " ", "answer": "2"})] * 30
    path = write(tmp_path / "p.jsonl", lines)
    with pytest.raises(RowError) as raised:
        read_source(SourceConfig(path=str(path)), map_row)
    first, *told = str(raised.value).splitlines()
    assert first == f"{path}: 43 of 43 rows have mistakes:"
    assert len(told) == SHOWN + 1
    assert told[-1] == "  and 33 rows with other mistakes"
    write(path, lines[-30:])
    with pytest.raises(RowError) as raised:
        read_source(SourceConfig(path=str(path), limit=20), map_row)
    first, told_once = str(raised.value).splitlines()
    assert first == f"{path}: 20 of the first 20 rows have mistakes:"
    assert told_once == (
        f"  {path}:1: column 'prompt' is empty; give it a text or remove the row (the same in "
        f"{', '.join(f'line {i}' for i in range(2, 11))} and 10 more)"
    )


def test_prompts_that_the_template_refuses_are_told_together(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "answer": "2"} for i in range(9)]
    path = write(tmp_path / "p.jsonl", [json.dumps(row) for row in rows])
    told = {"sources": ({"path": str(path)},), "prompts_per_step": 1}
    data = DataConfig.model_validate(told, strict=False)
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% if '3' in messages[0].content %}{{ raise_exception('no threes') }}{% endif %}"
        "{% if '5' in messages[0].content %}{{ raise_exception('no fives') }}{% endif %}"
        "{% if '7' not in messages[0].content %}{{ messages[0].content }}{% endif %}"
    )
    with pytest.raises(RowError) as raised:
        load_prompts(data.sources, data, tokenizer)
    refuses = "the chat template refuses this row"
    assert str(raised.value) == (
        f"{path}: 2 of 9 rows have mistakes:\n  {path}:4: {refuses}: no threes\n"
        f"  {path}:6: {refuses}: no fives"
    )
    write(path, [json.dumps(row) for row in rows[6:]])
    with pytest.raises(RowError, match=r"p\.jsonl:2: the prompt has no tokens") as raised:
        load_prompts(data.sources, data, tokenizer)


def test_all_rows_that_are_too_long_are_told_if_none_may_be(tmp_path: Path) -> None:
    rows = [
        {"messages": [*GOOD["messages"][:1], {"role": "assistant", "content": "2" * n}]}
        for n in (1, 90, 2, 80)
    ]
    path = write(tmp_path / "t.jsonl", [json.dumps(row) for row in rows])
    data = texts(path, max_tokens=40, too_long="refuse")
    with pytest.raises(RowError) as raised:
        load_texts(data.sources, data, char_tokenizer())
    first, *told = str(raised.value).splitlines()
    assert first == f"{path}: 2 of 4 rows have mistakes:"
    assert [line.split(":")[1] for line in told] == ["2", "4"]


def tenth(row: dict[str, Any]) -> dict[str, Any]:
    """A function of a user that fails on some rows."""
    return {"prompt": str(10 // row["n"]), "answer": "2"}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_a_function_goes_on_after_a_row_on_which_it_fails(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"n.{ending}"
    numbers = [1, 0, 2, 0]
    if ending == "csv":
        path.write_text("n,m\n" + "".join(f"{n},{n}\n" for n in numbers[:2]) + "1\n1,2,3\n")
        with pytest.raises(RowError, match=r"4 of 4 rows have mistakes"):
            read_source(
                SourceConfig(path=str(path), fn="tests.unit.data.test_mistakes:tenth"), map_row
            )
        return
    rows = [{"n": n} for n in numbers]
    path.write_text(json.dumps(rows) if ending == "json" else "\n".join(map(json.dumps, rows)))
    with pytest.raises(RowError) as raised:
        read_source(SourceConfig(path=str(path), fn="tests.unit.data.test_mistakes:tenth"), map_row)
    first, told = str(raised.value).splitlines()
    assert first == f"{path}: 2 of 4 rows have mistakes:"
    place, same = (":2", "line 4") if ending == "jsonl" else (": row 1", "row 3")
    assert told.startswith(
        f"  {path}{place}: tests.unit.data.test_mistakes:tenth raised ZeroDivision"
    )
    assert told.endswith(f"(the same in {same})")


def test_nothing_is_tokenized_after_a_mistake(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [json.dumps(GOOD)] * 3)
    data = texts(path)
    maker = ExampleMaker(texts_of(data, char_tokenizer()), "t", data.sources[0])
    [good] = chunks_of(data.sources[0])
    bad = texts(write(tmp_path / "b.jsonl", LINES[:3]))
    [wrong] = chunks_of(bad.sources[0])
    found = list(parts([good, wrong, good, wrong, RowsChunk([])], maker, processes=1))
    assert [len(part.tally.lengths) for part in found] == [3, 0, 0, 0, 0]
    assert [len(part.tally.mistakes) for part in found] == [0, 2, 0, 2, 0]


def test_mistakes_of_parts_are_those_of_the_whole() -> None:
    whole, added = Mistakes(), Mistakes()
    for part in range(4):
        own = Mistakes()
        for row in range(30):
            place = f"f:{30 * part + row}"
            error = RowError(f"{place}: mistake {row % (3 * part + 2)}")
            whole.note(place, error)
            own.note(place, error)
        added.add(own)
    assert added == whole
    assert len(whole) == 120
