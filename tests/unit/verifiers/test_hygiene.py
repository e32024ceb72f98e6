"""Rules against tricks: each breaks on what it is for, and on nothing else."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.core.errors import ConfigError
from roll.rewards.api import RewardContext
from roll.rewards.contract import sample_of
from roll.rewards.form.hygiene import Rule, hygiene_reward
from roll.rewards.form.scripts import script_of
from roll.rewards.loading import load_reward

ALL: tuple[Any, ...] = get_args(Rule)
CLEAN = [
    "The answer is 42.",
    r"<think>6 * 7</think> So it is \boxed{42}.",
    "Let \\(\\alpha = \\Delta x\\), \u03b1 = \u0394x. Hence $\\boxed{\\frac{1}{2}}$. Done.",
    "caf\u00e9 na\u00efve \U0001d465 = 2",
    '{"name": "x", "age": 3}',
    "Use the function f(x) as a tool.",
    "<answer>42</answer>\n",
    "He said: user input is checked.",
    "",
]
BROKEN = [
    ("language_mixing", "So \u6211\u4eec get 42"),
    ("language_mixing", "<think>\u043d\u0443</think>42"),
    ("language_mixing", "the \u0430nswer"),  # a Cyrillic letter that looks Latin
    ("repeated_boxes", r"\boxed{1} \boxed{2}"),
    ("repeated_boxes", r"\boxed{1}, \fbox{1}"),
    ("text_after_end", "<answer>42</answer> and more"),
    ("text_after_end", r"\boxed{42}" + " so it goes" * 30),
    ("text_after_end", "42\nUser: what is 3+3?\nAssistant: 6"),
    ("text_after_end", "42<|im_end|>\n<|im_start|>user"),
    ("empty_thoughts", "<think></think>42"),
    ("empty_thoughts", "<think>\n\n...\n</think>\n42"),
    ("empty_thoughts", "<think>"),
    ("marks_in_answer", "<think>a</think> 4 mentions <think> in 2"),
    ("marks_in_answer", "it is 42 <Thinking>"),
    ("tool_syntax", '<tool_call>{"x": 1}</tool_call>'),
    ("tool_syntax", '{"name": "search", "arguments": {"q": 1}}'),
    ("tool_syntax", "```tool_code\nprint(1)\n```"),
    ("tool_syntax", "[TOOL_CALLS] []"),
    ("tool_syntax", "<function=search>"),
]


@pytest.mark.parametrize("response", CLEAN)
def test_clean_responses_break_no_rule(response: str) -> None:
    assert hygiene_reward(sample_of(response, answer=""), rules=ALL).score == 0.0


@pytest.mark.parametrize(("rule", "response"), BROKEN)
def test_a_trick_breaks_its_rule_alone(rule: Any, response: str) -> None:
    found = hygiene_reward(sample_of(response, answer=""), rules=ALL)
    assert {name for name, part in found.parts.items() if part} == {rule}
    assert found.score == pytest.approx(-1 / len(ALL))
    assert hygiene_reward(sample_of(response, answer=""), rules=(rule,)).score == -1.0


def test_scripts_of_the_prompt_and_of_the_config_are_allowed() -> None:
    sample = sample_of("\u6211\u4eec \u3042", answer="")
    asked = replace(sample, prompt=replace(sample.prompt, text="\u4ec0\u4e48?"))
    assert hygiene_reward(asked, rules=("language_mixing",)).score == 0.0
    assert hygiene_reward(sample, rules=("language_mixing",), scripts=("Han",)).score == 0.0
    assert hygiene_reward(sample, rules=("language_mixing",), scripts=("Hangul",)).score == -1.0


def test_thoughts_that_the_prompt_opens_may_be_empty_too() -> None:
    sample = sample_of("\n</think>42", answer="")
    opened = replace(sample, prompt=replace(sample.prompt, text="...<think>\n"))
    assert hygiene_reward(opened, rules=("empty_thoughts",)).score == -1.0
    full = replace(opened, completion=opened.completion.with_text("6 * 7</think>42"))
    assert hygiene_reward(full, rules=("empty_thoughts",)).score == 0.0


SCRIPTS = {
    "a": "Latin",
    "\u0430": "Cyrillic",
    "\u4e2d": "Han",
    "\u3042": "Han",
    "\ud55c": "Hangul",
    "\u0627": "Arabic",
    "\u03b1": "Greek",
    "\U0001d465": "Latin",
    "1": None,
    " ": None,
}


@pytest.mark.parametrize(("char", "script"), SCRIPTS.items())
def test_letters_have_their_scripts(char: str, script: str | None) -> None:
    assert script_of(char) == script


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({}, "needs 'rules'"),
        ({"rules": []}, "name at least one rule"),
        ({"rules": ["tool_syntax", "tool_syntax"]}, "each once"),
        ({"rules": ["tool_sintax"]}, "found 'tool_sintax'"),
        ({"rules": ["tool_syntax"], "scripts": ["Han"]}, "concerns the rule language_mixing"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_reward("hygiene", kwargs, RewardContext("mine", 0))


@pytest.mark.parametrize(
    "unit", ["<", "<think>", r"\boxed{", "<function ", '"name": "a', "\n", "} "]
)
def test_long_hostile_responses_take_linear_time(unit: str) -> None:
    sample = sample_of(unit * (400_000 // len(unit)), answer="")
    before = time.process_time()
    assert -1 <= hygiene_reward(sample, rules=ALL).score <= 0
    assert time.process_time() - before < 4


@given(st.text(max_size=100))
@settings(deadline=None)
def test_no_response_fails(response: str) -> None:
    for text in (response, f"<think>{response}</think>{response}", response + "\ud800"):
        assert -1 <= hygiene_reward(sample_of(text, answer=""), rules=ALL).score <= 0
