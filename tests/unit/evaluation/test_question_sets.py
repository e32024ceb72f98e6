"""The shipped sets: each reads a row with the columns of its published data, shows the question,
and tells a right response from a wrong one."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from roll.commands.eval.cells import Cell, cells_of, load_questions
from roll.commands.eval.votes import votes_of
from roll.config.evaluation import QuestionSet
from roll.config.loading.question_sets import SHIPPED, load_set, set_file
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError, DataError
from roll.core.types import Prompt, Sample
from roll.rewards.api import RewardContext
from roll.rewards.contract import sample_of
from roll.rewards.loading import load_reward
from tests.tiny import char_tokenizer
from tests.unit.evaluation.published_rows import ROWS

MOMENT = datetime(2026, 1, 1)


def prompts_of(cell: Cell, folder: Path) -> Sequence[Prompt]:
    """Return the prompts of a cell for a model whose prompts are the questions alone."""
    if not (folder / "tokenizer.json").is_file():
        alphabet = "".join(map(chr, range(32, 127))) + "\n"
        tokenizer = char_tokenizer(alphabet)
        tokenizer.chat_template = "{{ messages[0].content }}"
        tokenizer.save_pretrained(folder)
    data = load_questions([cell], ModelConfig(path=str(folder)), MOMENT)
    return data[cell.set_name].items


def shipped(name: str, folder: Path) -> tuple[QuestionSet, Prompt]:
    """Return a shipped set and the prompt of its row, read from a local file."""
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(ROWS[name].row) + "\n")
    overrides = {name: [f"data.sources.0.path={file}"]}
    [cell] = cells_of({name: set_file(name)}, (), None, overrides)
    [prompt] = prompts_of(cell, folder / "model")
    return cell.questions, prompt


def sample(prompt: Prompt, response: str) -> Sample:
    made = sample_of(response, answer=prompt.answer, extra=prompt.extra)
    return Sample("0/a:0/0", "0/a:0", prompt, made.completion, response)


def reward_of(questions: QuestionSet, prompt: Prompt, response: str) -> float:
    """Return the weighted sum of the rewards of the prompt's tag, as a run computes it."""
    total, taken = 0.0, 0
    for name, config in questions.rewards.items():
        if prompt.tag not in config.tags:
            continue
        assert config.fn is not None
        bound = load_reward(config.fn, config.kwargs, RewardContext(name, seed=0))
        scored = asyncio.run(_waited(bound.call(sample(prompt, response))))
        total += config.weight * bound.result(sample(prompt, response), scored).score
        taken += 1
    assert taken, f"no reward takes the tag {prompt.tag!r}"
    return total


async def _waited(scored: Any) -> Any:
    """Return what a reward function returned, some of which are asynchronous."""
    return await scored if inspect.isawaitable(scored) else scored


def test_every_shipped_set_has_a_row_here() -> None:
    assert {file.stem for file in SHIPPED.iterdir()} == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_right_response_passes_and_a_wrong_one_does_not(name: str, tmp_path: Path) -> None:
    questions, prompt = shipped(name, tmp_path)
    published = ROWS[name]
    assert published.shown in prompt.text
    assert reward_of(questions, prompt, published.right) >= questions.pass_score
    assert reward_of(questions, prompt, published.wrong) < questions.pass_score
    assert reward_of(questions, prompt, "") < questions.pass_score


@pytest.mark.parametrize("name", ["gsm8k", "math500", "mmlu_pro", "gpqa_diamond"])
def test_equal_answers_have_one_vote(name: str, tmp_path: Path) -> None:
    questions, prompt = shipped(name, tmp_path)
    vote = votes_of(questions)[prompt.tag]
    right, wrong = ROWS[name].right, ROWS[name].wrong
    assert vote(sample(prompt, right)) == vote(sample(prompt, f"Let me see. {right}"))
    assert vote(sample(prompt, right)) != vote(sample(prompt, wrong))


def test_options_have_the_same_order_in_every_file(tmp_path: Path) -> None:
    _, prompt = shipped("gpqa_diamond", tmp_path)
    place = "ABCD".index(prompt.answer)
    assert prompt.extra["choices"][place] == "neutron"
    row = ROWS["gpqa_diamond"].row
    swapped = {"right": "Correct Answer", "wrong": [f"Incorrect Answer {i}" for i in (3, 1, 2)]}
    file = tmp_path / "two.jsonl"
    file.write_text(2 * (json.dumps(dict(reversed(row.items()))) + "\n"))
    overrides = [f"data.sources.0.path={file}", f"data.choices={json.dumps(swapped)}"]
    [cell] = cells_of({"x": set_file("gpqa_diamond")}, (), None, {"x": overrides})
    for other in prompts_of(cell, tmp_path / "model"):
        assert (other.text, other.answer) == (prompt.text, prompt.answer)


def test_rights_of_many_rows_have_all_letters(tmp_path: Path) -> None:
    row = ROWS["gpqa_diamond"].row
    rows = [row | {"Correct Answer": f"the {i}th"} for i in range(40)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    overrides = {"x": [f"data.sources.0.path={tmp_path / 'many.jsonl'}"]}
    [cell] = cells_of({"x": set_file("gpqa_diamond")}, (), None, overrides)
    letters = [prompt.answer for prompt in prompts_of(cell, tmp_path / "model")]
    assert set(letters) == set("ABCD")


def test_a_local_path_takes_the_place_of_a_part_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("{}\n")
    at = "data.sources.0"
    for path, others, left in (
        (tmp_path / "test.jsonl", (), (None, "train")),
        (tmp_path, (), (None, "test")),
        ("my/gsm8k", (), ("main", "test")),
        (tmp_path / "test.jsonl", (f"{at}.split=test",), (None, "test")),  # which is refused later
    ):
        [source] = load_set(set_file("gsm8k"), (f"{at}.path={path}", *others)).data.sources
        assert (source.subset, source.split) == left


def test_mistakes_in_a_set_are_named_with_their_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data:\n  sources: [{path: rows.jsonl}]\n  shuffle: true\nrewards: {}\n")
    with pytest.raises(ConfigError, match=r"mine.yaml:3: data.shuffle = True: unknown key"):
        load_set(file)
    file.write_text(
        "data:\n  sources: [{path: rows.jsonl, columns: {prompt: question}}]\n"
        "  template: '{{ question }}'\nrewards: {a: {fn: exact}}\n"
    )
    with pytest.raises(ConfigError, match=r"mine.yaml:1: data = .*drop `columns.prompt`"):
        load_set(file)
    with pytest.raises(ConfigError, match=r"did you mean.*gsm8k"):
        set_file("gsm8")
    file.write_text(
        "data: {sources: [{path: rows.jsonl}], template: '{{ quesion }}'}\n"
        "rewards: {a: {fn: exact}}\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "question": "b", "answer": "c"}\n')
    where = f"data.sources.0.path={tmp_path / 'rows.jsonl'}"
    [cell] = cells_of({"mine": file}, (), None, {"mine": [where]})
    with pytest.raises(DataError, match=r"rows.jsonl:1: data.template: 'quesion' is undefined"):
        prompts_of(cell, tmp_path / "model")


def test_a_greedy_cell_has_one_response_and_others_have_their_own() -> None:
    cells = cells_of({"gsm8k": set_file("gsm8k")}, (0.0, 0.6), 8, {})
    assert [(cell.name, cell.questions.samples_per_prompt) for cell in cells] == [
        ("gsm8k-t0", 1),
        ("gsm8k-t0.6", 8),
    ]
    with pytest.raises(ConfigError, match="-n 8: gsm8k-t0 are greedy"):
        cells_of({"gsm8k": set_file("gsm8k")}, (0.0,), 8, {})
    assert len(cells_of({"gsm8k": set_file("gsm8k")}, (0.0,), 1, {})) == 1
