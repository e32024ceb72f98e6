"""`roll data` on the rows of small runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from roll.commands.data.duplicates import Contradiction, Duplicates
from roll.commands.data.look import (
    BINS,
    Look,
    Piece,
    ShownRow,
    SourceLook,
    histogram,
    look_at,
)
from roll.commands.data.printing import print_look
from roll.config.loading.compose import load_config
from roll.core.errors import ConfigError
from tests.runs import write_rows_task, write_task


def dialogue(number: int, size: int = 1) -> dict[str, Any]:
    turns = [("user", f"{number}+1="), ("assistant", str(number + 1) * size), ("user", "and?")]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def printed(look: Look, *, terminal: bool = False) -> str:
    out = io.StringIO()
    print_look(look, Console(file=out, force_terminal=terminal, width=80), as_json=False)
    return out.getvalue()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rows = [*(dialogue(i) for i in range(6)), dialogue(2), dialogue(7, size=100)]
    rows.append({"messages": [{"role": "user", "content": "alone"}]})
    return write_rows_task(tmp_path, "sft", {"train": rows, "held_out": [dialogue(9), dialogue(3)]})


def test_counts_duplicates_and_overlap_are_told(texts: Path) -> None:
    look = look_at(load_config(texts).config, rows=2)
    train, held = look.sources
    assert (train.name, train.kept, train.read) == ("train", 7, 9)
    assert train.duplicates == Duplicates(1, ("train:6", "train:2"))
    assert (held.held_out, held.kept, held.duplicates.rows) == (True, 2, 0)
    assert look.overlap == [
        "1 rows of validation set held_out are in training source train, too, with the same tokens "
        "(first: held_out:1 is train:3)",
        "the run would train on these rows (data.overlap: warn)",
    ]
    text = printed(look)
    assert "1 with no turn of the assistant to learn" in text
    assert "1 with more than 64 tokens" in text
    assert sum(count for _, _, count in train.histogram) == 8


def test_what_is_trained_of_a_row_is_marked(texts: Path) -> None:
    look = look_at(load_config(texts).config, rows=1)
    assert "<user>0+1=<assistant>[[1<eos>]]\n" in printed(look)
    in_terminal = printed(look, terminal=True)
    assert "\x1b[32m1<eos>\x1b[0m" in in_terminal
    assert "[[" not in in_terminal


def test_pairs_and_prompts_are_shown(tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(4)]
    told = {"train": pairs, "held_out": pairs[:1]}
    path = write_rows_task(tmp_path / "dpo", "dpo", told, reference={"pool": "all"})
    text = printed(look_at(load_config(path).config, rows=1))
    assert "chosen:\n<user>0+1=<assistant>[[1<eos>]]\n" in text
    assert "rejected:\n<user>0+1=<assistant>[[0<eos>]]\n" in text
    prompts = look_at(load_config(write_task(tmp_path / "rlvr")).config, rows=3)
    assert [len(source.rows) for source in prompts.sources if not source.held_out] == [3]
    assert all(row.answer is not None for row in prompts.sources[0].rows)
    assert json.loads(json.dumps(prompts.sources[0].rows[0].id)) in printed(prompts)


def test_equal_prompts_that_expect_other_answers_are_told(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    config = load_config(path).config
    rows = [{"prompt": f"{i % 6}+1=", "answer": str(i % 6 + 1)} for i in range(18)]
    for place, answer in ((7, "9"), (8, " 3 "), (10, "x\x1b[2J" * 9), (13, "8"), (14, "7")):
        rows[place]["answer"] = answer
    source = Path(config.sources[0].path)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    look = look_at(config, rows=0)
    found = look.sources[0].duplicates
    name = look.sources[0].name
    assert (found.rows, found.contradicting) == (12, 4)
    assert found.contradictions[0] == Contradiction(f"{name}:7", "9", f"{name}:1", "2")
    text = " ".join(printed(look).split())
    assert (
        f"4 of them expect another answer than the earlier one: {name}:7 '9', {name}:1 '2'" in text
    )
    assert f"; {name}:13 '8', {name}:1 '2'; and 1 more. No policy can give both" in text
    assert "\x1b" not in text


def test_overlap_never_stops_the_look_and_its_consequence_is_told(texts: Path) -> None:
    def consequence(rule: str) -> str:
        return look_at(load_config(texts, [f"data.overlap={rule}"]).config, rows=0).overlap[-1]

    assert consequence("refuse") == "the run would not start (data.overlap: refuse)"
    assert consequence("drop") == "1 training rows would be left out (data.overlap: drop)"
    train, held = texts.parent / "train.jsonl", texts.parent / "held_out.jsonl"
    held.write_text(train.read_text())
    assert "would not start: source train: all of its rows" in consequence("drop")


def test_tasks_of_agents_are_refused() -> None:
    path = Path(__file__).parents[3] / "examples/agentic_frozen_lake/run.yaml"
    with pytest.raises(ConfigError, match="roll env try"):
        look_at(load_config(path).config, rows=1)


@given(st.lists(st.integers(1, 10_000), max_size=50))
def test_every_length_is_in_the_bar_that_names_it(lengths: list[int]) -> None:
    bars = histogram(lengths)
    assert len(bars) <= BINS
    for first, last, count in bars:
        assert count == sum(first <= length <= last for length in lengths)
    assert sum(count for _, _, count in bars) == len(lengths)


@given(
    st.lists(st.integers(1, 40), min_size=100, max_size=150),
    st.lists(st.integers(100, 10**6), max_size=5),
)
def test_few_long_rows_leave_the_others_apart(usual: list[int], long: list[int]) -> None:
    bars = histogram([*long, *usual])
    assert len(bars) <= BINS
    assert sum(count for _, _, count in bars) == len(usual) + len(long)
    for first, last, count in bars:
        assert count == sum(first <= length <= last for length in [*usual, *long])
    assert all(last - first < 9 for first, last, _ in bars[:-1])


def test_no_text_of_a_row_commands_the_terminal() -> None:
    row = ShownRow("a:0", 1, [[Piece("a\x1b[2J\nb", trained=True)]], answer="\x07")
    source = SourceLook("a", False, 1, 1, [], 1, 1, [(1, 1, 1)], Duplicates(), [row])
    text = printed(Look([source], [], 5))
    assert "[[a\\x1b[2J\nb]]" in text
    assert "\x1b" not in text
    assert "\x07" not in text
