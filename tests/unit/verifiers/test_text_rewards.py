"""Rewards that compare texts: numbers of their packages, and safety against any response."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.config.sections.reward import RewardConfig
from roll.core.errors import ConfigError, DataError
from roll.rewards.api import Reward, RewardContext
from roll.rewards.contract import sample_of
from roll.rewards.execution.pool import RewardPool
from roll.rewards.loading import load_reward
from roll.rewards.text.bleu import bleu, bleu_reward
from roll.rewards.text.contains import contains_reward
from roll.rewards.text.json_schema import json_reward, json_text
from roll.rewards.text.number import number_reward, parse_number
from roll.rewards.text.pattern import pattern_reward
from roll.rewards.text.rouge import rouge, rouge_reward
from roll.rewards.text.similarity import similarity, similarity_reward

ROWS = json.loads((Path(__file__).parents[2] / "golden" / "text.json").read_text())
Fn = Callable[..., Reward | float]


def _score(fn: Fn, response: str, answer: str = "", extra: Any = None, **options: Any) -> float:
    found = fn(sample_of(response, answer=answer, extra=extra), **options)
    return found.score if isinstance(found, Reward) else found


def test_rouge_has_the_numbers_of_rouge_score() -> None:
    for row in ROWS:
        for measure, numbers in row["rouge"].items():
            mine = [
                rouge(row["text"], row["references"][0], measure, value)
                for value in ("precision", "recall", "f1")
            ]
            assert mine == pytest.approx(numbers), row


def test_bleu_has_the_numbers_of_sacrebleu() -> None:
    assert sum(row["13a"] > 0 for row in ROWS) > 50
    for row in ROWS:
        for tokens in ("13a", "char"):
            mine = bleu(row["text"], row["references"], tokens)
            assert 100 * mine == pytest.approx(row[tokens]), row


def _distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        last, row[0] = row[0], i + 1
        for j, y in enumerate(b):
            last, row[j + 1] = row[j + 1], min(row[j + 1] + 1, row[j] + 1, last + (x != y))
    return row[-1]


@given(st.text("ab c", max_size=8), st.text("ab c", max_size=8))
def test_similarity_is_levenshteins(text: str, reference: str) -> None:
    a, b = text.strip(), reference.strip()
    wanted = 1 - _distance(a, b) / max(len(a), len(b), 1)
    assert similarity(text, reference, "characters") == pytest.approx(wanted)


def test_the_best_reference_counts_and_thoughts_do_not() -> None:
    row = {"refs": ["a dog", "the cat sat"]}
    for fn in (rouge_reward, similarity_reward, bleu_reward):
        assert _score(fn, "<think>x</think>the cat sat", "", row, references="refs") == 1.0
        assert _score(fn, "<think>the cat sat", "", row, references="refs") == 0.0
        assert _score(fn, "", "") == 0.0
    assert _score(similarity_reward, "The Cat", "the cat", case=False, at_least=0.9) == 1.0
    assert _score(similarity_reward, "a b c d", "a b x d", unit="words") == 0.75


@pytest.mark.parametrize(
    ("response", "options", "score"),
    [
        ("Cats and dogs", {"phrases": ("dogs", "CATS")}, 1.0),
        ("Cats and dogs", {"phrases": ("dog",)}, 0.0),
        ("Cats and dogs", {"phrases": ("dog",), "whole_words": False}, 1.0),
        ("Cats and dogs", {"phrases": ("Dogs",), "case": True}, 0.0),
        ("Cats", {"phrases": ("dogs", "cats"), "how": "any"}, 1.0),
        ("Cats", {"phrases": ("dogs", "cats"), "how": "share"}, 0.5),
        ("Cats", {"phrases": ("dogs",), "how": "none"}, 1.0),
        ("", {"phrases": ("dogs",), "how": "none"}, 0.0),
        ("New\n  York", {"phrases": ("new york",)}, 1.0),
        ("\uff23ats", {"phrases": ("cats",)}, 1.0),
        ("C++ (sic)", {"phrases": ("c++", "(sic)")}, 1.0),
        ("one two three cats", {"phrases": ("cats",), "max_words": 3}, 0.0),
        ("<think>cats</think>dogs", {"phrases": ("cats",)}, 0.0),
        ("答案是东京塔。", {"phrases": ("东京",)}, 1.0),
        ("東京タワーです", {"phrases": ("タワー",)}, 1.0),
        ("ผมรักแมวมาก", {"phrases": ("แมว",)}, 1.0),
        ("我用GPU加速", {"phrases": ("gpu",)}, 1.0),
        ("我用GPUs加速", {"phrases": ("gpu",)}, 0.0),
        ("不是东京", {"phrases": ("东京",), "how": "none"}, 0.0),
        ("是东京,Tokyo!", {"phrases": ("东京",), "max_words": 4}, 1.0),
        ("是东京,Tokyo!", {"phrases": ("东京",), "max_words": 3}, 0.0),
        ("서울에서 왔어요", {"phrases": ("서울에서",), "max_words": 2}, 1.0),
    ],
)
def test_phrases_are_found(response: str, options: dict[str, Any], score: float) -> None:
    assert _score(contains_reward, response, **options) == score


def test_phrases_may_come_from_the_row() -> None:
    assert _score(contains_reward, "a cat", "cat") == 1.0
    assert _score(contains_reward, "a cat", "", {"must": ["cat", "dog"]}, column="must") == 0.0
    assert _score(contains_reward, "anything", "") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("-3.5 m", "-3.5"),
        ("\u22123", "-3"),
        ("$1,234.50", "1234.5"),
        ("1e-3", "0.001"),
        ("3/4", "0.75"),
        ("50%", "0.5"),
        (".5", "0.5"),
        ("about 7 apples", "7"),
        ("3 or 4", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("1_000", None),
        ("1/0", None),
        ("x2", None),
        ("1.2.3", None),
        ("\u0661\u0662", None),
        pytest.param("9" * 2000, None, id="long"),
        ("", None),
    ],
)
def test_exactly_one_number_is_read(text: str, number: str | None) -> None:
    found = parse_number(text)
    assert (None if found is None else float(found)) == (None if number is None else float(number))


@pytest.mark.parametrize(
    ("response", "answer", "options", "score"),
    [
        (r"so \boxed{3.14}", "3.14159", {"absolute": 0.01}, 1.0),
        (r"so \boxed{3.14}", "3.14159", {}, 0.0),
        ("The answer is 101 km.", "100", {"relative": 0.01}, 1.0),
        ("The answer is 102 km.", "100", {"relative": 0.01}, 0.0),
        ("<answer>7</answer>", "x #### 7", {}, 1.0),
        ("<answer>6, 7, 8</answer>", "7", {}, 0.0),
        ("<think>7</think>", "7", {}, 0.0),
        ("NaN", "7", {"relative": 1.0}, 0.0),
    ],
)
def test_a_number_counts_within_its_tolerance(
    response: str, answer: str, options: dict[str, Any], score: float
) -> None:
    assert _score(number_reward, response, answer, **options) == score


def test_a_truth_without_a_number_is_told() -> None:
    with pytest.raises(DataError, match="is not one number"):
        _score(number_reward, "7", "seven")


def test_patterns_match_or_must_not() -> None:
    day = r"\d{4}-\d\d-\d\d"
    assert _score(pattern_reward, "on 2024-01-31.", pattern=day) == 1.0
    assert _score(pattern_reward, "on 2024-01-31.", pattern=day, find="fullmatch") == 0.0
    assert _score(pattern_reward, "on 2024-01-31.", pattern=day, expect="no_match") == 0.0
    assert _score(pattern_reward, "", pattern="x*", expect="no_match") == 0.0
    assert _score(pattern_reward, "ABC", "", {"re": "b"}, column="re", ignore_case=True) == 1.0
    with pytest.raises(DataError, match="is no regular expression"):
        _score(pattern_reward, "ABC", "", {"re": "("}, column="re")


@pytest.mark.parametrize("expect", ["match", "no_match"])
def test_a_pattern_that_a_response_blows_up_scores_nothing(expect: Any) -> None:
    before = time.monotonic()
    sample = sample_of("a" * 40 + "b", answer="")
    found = pattern_reward(sample, pattern=r"(?:a|a|aa)+$", find="fullmatch", expect=expect)
    assert found == Reward(0.0, {"timeout": 1.0})
    assert time.monotonic() - before < 30
    assert _score(pattern_reward, "aaa", pattern="a+") == 1.0


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "options", "score"),
    [
        ('{"name": "x", "age": 3}', {}, 1.0),
        ('```json\n{"name": "x"}\n```', {}, 1.0),
        ('Here:\n```\n{"name": "x"}\n```\nBye', {"place": "block"}, 1.0),
        ('```json\n{"name": 1}\n```\n```json\n{"name": "x"}\n```', {}, 1.0),
        ('Here: {"name": "x"}', {}, 0.0),
        ('{"name": "x"}', {"place": "block"}, 0.0),
        ('{"age": 3}', {}, 0.0),
        ('{"name": "x", "age": -1}', {}, 0.0),
        ('{"name": "x", "age": NaN}', {}, 0.0),
        ('{"name": 1, "name": "x"}', {}, 0.0),
        ('{"name": "x", "other": 1}', {}, 0.0),
        pytest.param("[" * 100_000, {}, 0.0, id="nested"),
        ("", {}, 0.0),
    ],
)
def test_json_fits_its_schema(response: str, options: dict[str, Any], score: float) -> None:
    assert _score(json_reward, response, schema=SCHEMA, **options) == score


def test_schemas_may_come_from_the_row_and_fetch_nothing() -> None:
    row = {"schema": json.dumps(SCHEMA), "far": {"$ref": "http://127.0.0.1:9/x.json"}}
    assert _score(json_reward, '{"name": "x"}', "", row, column="schema") == 1.0
    assert _score(json_reward, "{}", "", row, column="far") == 0.0
    with pytest.raises(DataError, match="expected a mapping"):
        _score(json_reward, "{}", "", row, column="none")


@pytest.mark.parametrize(
    ("fn", "kwargs", "says"),
    [
        ("rouge", {"measure": "rouge3"}, "found 'rouge3'"),
        ("similarity", {"at_least": 2}, "expected a number above 0"),
        ("contains", {"phrases": ["x"], "column": "y"}, "not both"),
        ("contains", {"phrases": [" "]}, "has an empty text"),
        ("pattern", {}, "give pattern or column"),
        ("pattern", {"pattern": "("}, "is no regular expression"),
        ("json", {"schema": {"type": "objekt"}}, "is no JSON schema"),
        ("number", {"absolute": -1}, "expected a number from 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(fn: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_reward(fn, kwargs, RewardContext("mine", 0))


def _all(response: str) -> None:
    for fn in (rouge_reward, bleu_reward, similarity_reward):
        assert 0 <= _score(fn, response, "the cat sat on 9-11") <= 1 + 1e-9
    assert _score(contains_reward, response, phrases=("x", "y"), how="share") in (0, 0.5, 1)
    assert _score(number_reward, response, "7") in (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", ["a ", "7", ",", "the cat ", "x", "\ufdfa", "&amp;", "```\n", "1,"]
)
def test_long_hostile_responses_take_linear_time(unit: str) -> None:
    response = unit * (150_000 // len(unit))
    before = time.process_time()
    _all(response)
    assert _score(json_reward, response, schema=SCHEMA) == 0.0
    assert time.process_time() - before < 6


@pytest.mark.parametrize("begin", ["```", "\n```", " ```json", ""])
@pytest.mark.parametrize("run", [" ", "\t", "x"])
def test_a_long_run_behind_a_fence_takes_linear_time(begin: str, run: str) -> None:
    before = time.process_time()
    assert json_text(f"{begin}{run * 100_000}x y", "block") is None
    assert time.process_time() - before < 1


@given(st.text(max_size=80))
@settings(deadline=None, max_examples=50)
def test_no_response_fails(response: str) -> None:
    _all(response)
    _all(f"<answer>{response}</answer>")
    assert _score(json_reward, response, schema=SCHEMA) == 0.0
    assert _score(pattern_reward, response + "\ud800", pattern="x") == float("x" in response)


def test_a_batch_of_responses_that_blow_a_pattern_up_costs_no_sample() -> None:
    config = RewardConfig(fn="pattern", kwargs={"pattern": r"^(?:a|a|aa)+$"})
    pool = RewardPool.from_config("r", config, seed=0)
    try:
        pool.begin_step(6)
        samples = [sample_of("a" * 40 + f"b{i}", answer="") for i in range(6)]
        scored = asyncio.run(pool.score(samples))
        assert [each.reward for each in scored] == [Reward(0.0, {"timeout": 1.0})] * 6
    finally:
        pool.close()
