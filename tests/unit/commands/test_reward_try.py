"""`roll reward try`: rewards on responses, without a policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roll.cli import app
from roll.commands.reward_try.report import confusion_table, kinds_lines
from roll.commands.reward_try.tries import RewardTry, try_rewards_on
from roll.config import load_config
from roll.core.errors import ConfigError, DataError
from tests.runs import write_task
from tests.services import ScriptedJudge, serving_beside
from tests.tiny import save_tiny_judge

JUDGE = {"url": "http://127.0.0.1:1/v1", "model": "m", "tries": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return folder


def _run(folder: Path, name: str, rewards: dict[str, Any], **changes: Any) -> Path:
    """Another run file for the model and data of the folder."""
    import yaml

    config = yaml.safe_load((folder / "run.yaml").read_text()) | {"rewards": rewards, **changes}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _try(path: Path, **options: Any) -> dict[str, RewardTry]:
    found = try_rewards_on(load_config(path).config, path.parent, **options)
    return {one.name: one for one in found}


def _scores(one: RewardTry) -> list[float | None]:
    rewards = [each.scored.reward for each in one.tried]
    return [None if reward is None else reward.score for reward in rewards]


def _write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_without_responses_a_verifier_tells_own_answers_from_others(folder: Path) -> None:
    path = _run(
        folder,
        "plain",
        {"exact": {"fn": "exact"}, "brief": {"fn": "length", "kwargs": {"longest": 3}}},
    )
    found = _try(path, rows=3)
    assert _scores(found["exact"]) == [1, 0, 0] * 3
    assert kinds_lines([found["exact"]]) == [
        "exact: 1 for its own answer, 0 for another row's answer, 0 for an empty response"
    ]
    samples = [each.response.sample for each in found["exact"].tried]
    assert [s.num_response_tokens for s in samples] == [len(s.response_text) for s in samples]
    assert all(one.latency_s > 0 for one in found["exact"].tried)


def test_few_responses_are_listed_with_their_scores(folder: Path, tmp_path: Path) -> None:
    path = _run(
        folder, "listed", {"exact": {"fn": "exact"}, "broken": {"fn": "test_run_rewards:raising"}}
    )
    answers = [{"id": "train:0", "response": "1"}, {"id": "train:1", "response": "[b]no[/b]"}]
    responses = str(_write(tmp_path / "a", *answers))
    shown = CliRunner().invoke(app, ["reward", "try", str(path), "--responses", responses])
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.output.splitlines()]
    assert ["train:0/0", "failed", "1", "'1'"] in lines
    assert ["train:1/0", "failed", "0", "'[b]no[/b]'"] in lines
    many = str(_write(tmp_path / "b", *({"response": str(n)} for n in range(21))))
    shown = CliRunner().invoke(app, ["reward", "try", str(path), "--responses", many])
    assert "train:0/0 │" not in shown.output


def test_responses_go_to_their_rows_by_order_or_by_id(folder: Path, tmp_path: Path) -> None:
    path = _run(folder, "exact", {"exact": {"fn": "exact"}})
    in_order = _write(tmp_path / "a", {"response": "1"}, {"responses": ["3", "4"]})
    assert _scores(_try(path, responses=in_order)["exact"]) == [1, 1, 0]
    by_id = _write(
        tmp_path / "b",
        {"id": "7/train:5/2", "response": "11", "finish_reason": "length"},
        {"id": "train:4", "response": "9"},
        {"id": "2/train:14+1/0", "response": "9"},
        {"id": "4/held_out:1/0", "response": "35"},
    )
    found = _try(path, responses=by_id)["exact"]
    assert _scores(found) == [1, 1, 0, 1]
    assert [one.response.sample.truncated for one in found.tried] == [True, False, False, False]
    assert _scores(_try(path, responses=by_id, rows=2)["exact"]) == [1, 1]


@pytest.mark.parametrize("name", ["train:\u00b2", "train:\u0661", "train:-1", "train:", "train"])
def test_an_id_that_names_no_row_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    path = _run(folder, "exact", {"exact": {"fn": "exact"}})
    responses = _write(tmp_path / "r", {"id": name, "response": "1"})
    with pytest.raises(DataError, match=f"`id` '{name}' names no row of the run; expected <source"):
        _try(path, responses=responses)


def test_labels_make_a_table_of_confusion(folder: Path, tmp_path: Path) -> None:
    path = _run(folder, "labels", {"exact": {"fn": "exact"}, "bad": {"fn": "test_run_rewards:nan"}})
    texts = ["1", " 3", "six", "7"]
    responses = _write(tmp_path / "r", *({"response": text} for text in texts))
    gold = _write(tmp_path / "g", *({"label": x} for x in (True, 0.0, 1, 1)))
    result = CliRunner().invoke(
        app, ["reward", "try", str(path), "--responses", str(responses), "--against", str(gold)]
    )
    assert result.exit_code == 1, "the reward `bad` would stop a run"
    assert "exact: scored 1, label 0, train:1/0 ' 3'" in result.output
    assert "exact: scored 0, label 1, train:2/0 'six'" in result.output
    assert "bad: failed on train:0/0 '1' and 3 more: ValueError: score must be finite" in (
        result.output
    )
    table = confusion_table([*_try(path, responses=responses, against=gold).values()])
    assert table is not None
    columns = [list(column.cells) for column in table.columns]
    rows = dict(zip(columns[0], zip(*columns[1:], strict=True), strict=True))
    assert rows["exact"] == ("2", "1", "1", "0", "0", "50.0%")
    assert rows["bad"] == ("0", "0", "0", "0", "4", "-")


def test_a_run_that_needs_no_more_than_its_rewards_is_fine(folder: Path) -> None:
    path = _run(
        folder,
        "fine",
        {"math": {"fn": "math"}, "twins": {"fn": "test_run_rewards:longest", "per": "group"}},
    )
    result = CliRunner().invoke(app, ["reward", "try", str(path), "--rows", "2"])
    assert result.exit_code == 0, result.output
    assert "math: 1 for its own answer, 0 for another row's answer, 0 for an empty" in result.output
    [size] = [line.split() for line in result.output.splitlines() if "size" in line]
    assert size[1:9:2] == ["size", "6", "3", "3"], "samples, mean and lowest of the part"


def test_judges_are_asked_and_their_failures_told(folder: Path) -> None:
    judged = {"j": {"judge": {"by": "strong", "template": "{{ response }}"}}}
    server = ScriptedJudge(lambda message: '{"reason": "", "score": 5}')
    with serving_beside(server.answer) as url:
        judge = {**JUDGE, "url": f"{url}/v1"}
        found = _try(_run(folder, "judged", judged, judges={"strong": judge}), rows=2)["j"]
    assert _scores(found) == [0.5, 0.5, 0, 0.5, 0.5, 0]
    gone = _try(_run(folder, "gone", judged, judges={"strong": JUDGE}), rows=1)["j"]
    assert _scores(gone) == [None, None, 0]
    assert gone.would_stop_a_run


def test_a_comparison_of_prompts_with_one_response_each_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    asked = {"by": "strong", "template": "{{ responses }}", "verdict": {"kind": "ranking"}}
    judged = {"j": {"judge": asked, "per": "group"}}
    path = _run(folder, "alone", judged, judges={"strong": JUDGE}, validation={})
    responses = _write(tmp_path / "r", *({"response": text} for text in "123"))
    with pytest.raises(DataError, match=r"rewards\.j: compares the responses to a prompt, and no"):
        _try(path, responses=responses)


@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_judge_of_the_run_answers_with_an_engine_of_its_own(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    judge = {
        "pool": "all",
        "model": {"path": str(save_tiny_judge(tmp_path / "judge"))},
        "strategy": {"kind": kind},
        "max_question_tokens": 1500,
    }
    asked = {"by": "own", "max_new_tokens": 30, "verdict": {"kind": "json", "reason": False}}
    rewards = {
        "a": {"judge": {**asked, "template": "{{ response }}"}},
        "b": {"judge": {**asked, "template": "Hm: {{ response }}"}},
    }
    found = _try(_run(folder, "own", rewards, judges={"own": judge}), rows=2)
    for name in "ab":
        assert not found[name].failures
        assert not found[name].would_stop_a_run


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([{"text": "1"}], "a:1: needs `response`"),
        ([{"response": 1}], "a:1: needs `response`"),
        ([{"response": "1", "label": 7}], "label 7 must be true, false or a number from 0 to 1"),
        ([{"responses": ["1"], "labels": [1, 0]}], "1 responses and 2 labels"),
        ([{"response": "1", "id": "train:0"}, {"response": "1"}], "a:2: has no `id`"),
        ([{"response": "1", "id": "trian:0"}], "names no row of the run"),
        ([{"response": "1", "id": "train:99"}], "names no row of the run"),
        ([{"response": "1"}] * 17, "has 17 lines, but the run has 16 rows"),
        ([], "has no lines"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, lines: list[dict[str, Any]], why: str
) -> None:
    path = _run(folder, "exact", {"exact": {"fn": "exact"}})
    with pytest.raises(DataError, match=why):
        _try(path, responses=_write(tmp_path / "a", *lines))


def test_labels_must_be_as_many_as_responses(folder: Path, tmp_path: Path) -> None:
    path = _run(folder, "exact", {"exact": {"fn": "exact"}})
    responses = _write(tmp_path / "r", {"response": "1"}, {"response": "3"})
    gold = _write(tmp_path / "g", {"label": 1})
    with pytest.raises(DataError, match="has 1 labels for 2 responses"):
        _try(path, responses=responses, against=gold)
    with pytest.raises(DataError, match="no such file"):
        _try(path, responses=tmp_path / "nowhere")


def test_a_run_without_rewards_is_refused(folder: Path) -> None:
    config = load_config(folder / "run.yaml").config
    with pytest.raises(ConfigError, match="has no `rewards` to try"):
        try_rewards_on(config.model_copy(update={"rewards": {}}), folder)


def test_rewards_of_steps_are_placed_at_their_tokens(folder: Path, tmp_path: Path) -> None:
    path = _run(folder, "steps", {"steps": {"fn": "test_run_rewards:steps", "process": True}})
    (found,) = _try(path, responses=_write(tmp_path / "a", {"response": "a1b2"}))["steps"].tried
    assert found.scored.failure is None
    assert found.scored.steps is not None
    assert found.scored.steps.pairs == ((1, 0.0), (2, 1.0), (3, 0.0), (4, 1.0))
