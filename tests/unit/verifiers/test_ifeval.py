"""The checks of IFEval: equal to the original's, and safe against any response."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.errors import DataError
from roll.rewards.api import Reward
from roll.rewards.contract import sample_of
from roll.rewards.instructions.checkers import CHECKERS
from roll.rewards.instructions.reward import ifeval_reward, variants

GOLDEN = Path(__file__).parents[2] / "golden" / "ifeval.jsonl.gz"
ROWS = [json.loads(line) for line in gzip.decompress(GOLDEN.read_bytes()).splitlines()]

ARGUMENTS: dict[str, dict[str, Any]] = {
    name: arguments
    for row in ROWS
    for name, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True)
}
"""Some arguments for each instruction."""


def _follows(name: str, response: str, hardened: bool = False, **arguments: Any) -> bool:
    row = {"instruction_id_list": [name], "kwargs": [arguments]}
    return _reward(response, row, hardened=hardened).score == 1.0


def _reward(response: str, row: dict[str, Any], **options: Any) -> Reward:
    return ifeval_reward(sample_of(response, answer="", extra=row), **options)


@pytest.mark.parametrize("mode", ["strict", "loose"])
def test_verdicts_are_those_of_the_original(mode: Any) -> None:
    wrong = []
    for row in ROWS:
        texts = [row["response"]] if mode == "strict" else variants(row["response"])
        texts = [text for text in texts if text.strip()]
        for name, given_, wanted in zip(
            row["instruction_id_list"], row["kwargs"], row[mode], strict=True
        ):
            if any(CHECKERS[name].follows(text, **given_) for text in texts) != wanted:
                wrong.append((name, given_, row["response"], wanted))
    assert wrong == []


@pytest.mark.parametrize("mode", ["strict", "loose"])
def test_the_reward_joins_the_verdicts_of_a_row(mode: Any) -> None:
    for row in ROWS[:200]:
        found = _reward(row["response"], row, mode=mode, score="share")
        assert found.score == pytest.approx(sum(row[mode]) / len(row[mode]))
        assert found.parts["all"] == float(all(row[mode]))
        assert _reward(row["response"], row, mode=mode).score == float(all(row[mode]))


def test_the_golden_file_has_both_verdicts_of_every_instruction() -> None:
    seen = Counter(
        (name, verdict)
        for row in ROWS
        for name, verdict in zip(row["instruction_id_list"], row["strict"], strict=True)
    )
    assert len(ROWS) == 1000
    assert {name for name, _ in seen} == set(CHECKERS)
    assert len(CHECKERS) == 25
    assert {name for name in CHECKERS if min(seen[name, True], seen[name, False]) < 5} == set()


@pytest.mark.parametrize(
    ("name", "arguments", "yes", "no"),
    [
        ("keywords:existence", {"keywords": ["a(b", "Dog"]}, "dogs in A(B", "dogs in ab"),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "a catalogue", "a Cat."),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "aA", "a"),
        (
            "keywords:letter_frequency",
            {"letter": "!", "let_frequency": 2.0, "let_relation": "less than"},
            "yes!",
            "yes!!",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[x]", "[\n]"),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', '{"a": 1'),
        ("detectable_format:title", {}, "<<x>>", "<<\nx>>"),
        ("startend:quotation", {}, ' "x" ', '"'),
        (
            "length_constraints:number_sentences",
            {"num_sentences": 3, "relation": "at least"},
            "Dr. No left. Wow!!!",
            "Dr. No left. Wow!",
        ),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 4, "capital_relation": "at least"},
            "IT'S NASA. X",
            "IT IS NASA",
        ),
    ],
)
def test_single_rules(name: str, arguments: dict[str, Any], yes: str, no: str) -> None:
    assert _follows(name, yes, **arguments)
    assert not _follows(name, no, **arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "response"),
    [
        ("language:response_language", {"language": "fr"}, "1234 !!!"),
        ("detectable_format:constrained_response", {}, "My answer is yes. My answer is no."),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[][]"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* *a*"),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "a c\u0430t, a c\u200bat"),
        ("punctuation:no_comma", {}, "one\uff0c two"),
        ("combination:two_responses", {}, "Same.\n******\nsame"),
        ("detectable_format:title", {}, "<<->>"),
        ("detectable_format:json_format", {}, "1"),
    ],
)
def test_what_follows_only_the_letter_is_refused_when_hardened(
    name: str, arguments: dict[str, Any], response: str
) -> None:
    assert _follows(name, response, **arguments)
    assert not _follows(name, response, hardened=True, **arguments)


def test_thoughts_are_not_looked_at() -> None:
    thought = "<think>one, two</think>\n\nThree"
    assert _follows("punctuation:no_comma", thought)
    first: dict[str, Any] = {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "three"}
    assert _follows("length_constraints:nth_paragraph_first_word", thought, **first)
    assert not _follows("punctuation:no_comma", "<think>never ends")
    assert not _follows("punctuation:no_comma", " \n")


def test_instructions_may_be_json_texts_or_in_the_answer() -> None:
    row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    packed = {key: json.dumps(value) for key, value in row.items()}
    assert _reward("no comma", packed).score == 1.0
    gaps = row | {"kwargs": [{"num_words": None, "keywords": None}]}
    assert _reward("no comma", gaps).score == 1.0
    assert ifeval_reward(sample_of("no, comma", answer=json.dumps(row))).score == 0.0


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, "has no column 'instruction_id_list'"),
        ({"instruction_id_list": []}, "0 ids in"),
        ({"instruction_id_list": ["punctuation:no_coma"]}, "did you mean 'punctuation:no_comma'"),
        ({"instruction_id_list": ["keywords:existence"]}, "the argument 'keywords' is missing"),
        (
            {
                "instruction_id_list": ["length_constraints:number_paragraphs"],
                "kwargs": [{"num_paragraphs": "3"}],
            },
            "num_paragraphs is '3', expected a whole number",
        ),
    ],
)
def test_a_wrong_row_is_told(row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        _reward("x", row)


HOSTILE = [
    "[",
    "<<",
    "*",
    "\n",
    " ",
    "\n* ",
    ".",
    "a. ",
    "!? ",
    "'s ",
    "***",
    "P.",
    '"',
    "\u202e",
    "{",
    "it's. ",
]


@pytest.mark.parametrize("unit", HOSTILE)
def test_long_hostile_responses_take_linear_time(unit: str) -> None:
    """The quadratic forms of the original take minutes on these."""
    response = unit * (60_000 // len(unit))
    row = {
        "instruction_id_list": list(CHECKERS),
        "kwargs": [ARGUMENTS.get(name, {}) for name in CHECKERS],
    }
    before = time.process_time()
    _reward(response, row, hardened=True)
    assert time.process_time() - before < 5


@given(st.text(max_size=200))
@settings(max_examples=25, deadline=None)
def test_no_response_makes_a_check_fail(response: str) -> None:
    row = {
        "instruction_id_list": list(CHECKERS),
        "kwargs": [ARGUMENTS.get(name, {}) for name in CHECKERS],
    }
    for mode in ("strict", "loose"):
        found = _reward(response, row, mode=mode, score="share", hardened=True)
        assert 0 <= found.score <= 1
