"""What `roll check` measures, on files and tokenizers of all pipelines."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from roll.cli import app
from roll.commands.trials.result import Trial
from roll.commands.trials.trial import LOOKED_AT, try_data
from roll.config import load_config
from roll.data.store.load import LARGE_BYTES
from tests.pictures import coloured, file_of
from tests.pipelines.test_agentic import task as agentic_task
from tests.runs import write_rows_task, write_task
from tests.tiny import char_tokenizer
from tests.vision_models import save_vision_model


def check(path: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", str(path), *arguments])
    return result.exit_code, result.output


def prompts(path: Path, texts: list[str]) -> None:
    rows = [{"prompt": text, "answer": "1"} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tried(path: Path, *overrides: str) -> Trial:
    return try_data(load_config(path, overrides).config)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def train(task: Path) -> Any:
    """The training file, put back afterwards."""
    path = task.parent / "train.jsonl"
    before = path.read_text()
    yield path
    path.write_text(before)


def test_it_says_ok_when_all_is(task: Path) -> None:
    code, told = check(task)
    assert (code, told.splitlines()[-1]) == (0, "ok"), told
    assert "train.jsonl: 16 of 16 rows kept, the longest has " in told
    assert "held_out.jsonl: 8 of 8 rows kept" in told


def test_rows_have_the_names_of_a_run(task: Path) -> None:
    [row] = tried(task).rows.values()
    assert row.id.startswith("train:"), "as in rollouts, and for `roll reward try`"


def test_the_first_thousand_rows_are_looked_at(task: Path, train: Path) -> None:
    prompts(train, ["1"] * (LOOKED_AT + 5))
    assert f"{LOOKED_AT} of the first {LOOKED_AT} rows kept" in tried(task).told[0]
    train.write_text(train.read_text() + "no row\n")
    config = load_config(task).config
    alone = config.validation.model_copy(update={"sets": {}})
    assert try_data(config.model_copy(update={"validation": alone})).wrong == []
    assert "no row" in str(tried(task).wrong), "all rows are read for the overlap"


def test_a_file_that_begins_with_its_longest_rows_is_judged_as_a_whole(
    task: Path, train: Path
) -> None:
    prompts(train, ["1" * 40] * LOOKED_AT + ["1"] * (LOOKED_AT + 5))
    trial = tried(task)
    assert trial.wrong == []
    assert f"{LOOKED_AT + 5} of {2 * LOOKED_AT + 5} rows kept" in trial.told[0]


def test_it_says_what_it_could_not_try(task: Path) -> None:
    code, told = check(task, "model.path=some-org/no-such-model")
    last = " ".join(told.split("ok, but not tried: ")[1].split())
    assert code == 0
    assert "data.sources.0 (no tokenizer), validation.sets.held_out (no tokenizer)" in last


@pytest.mark.parametrize("wrong", ["data.sources.0.columns.prompt=promt", "model.path=/no/model"])
def test_errors_come_alone(task: Path, wrong: str) -> None:
    code, told = check(task, wrong)
    assert code == 2
    assert not any(word in told for word in ("pool (devices)", "of at most", "note: ", "--expect"))


@pytest.mark.slow
def test_a_tracker_of_the_user_is_named(task: Path) -> None:
    code, told = check(task, "track.trackers=[{kind: 'tests.own_parts:Table'}]")
    assert code == 0, told
    assert "track.trackers.0: tests.own_parts:Table can be made as" in " ".join(told.split())


def both(task: Path, train: Path, before: int = 0) -> None:
    """Write training rows of which the last three are in the validation set, two of them equal."""
    held = (task.parent / "held_out.jsonl").read_text().splitlines()[:2]
    first = [json.dumps({"prompt": f"{i}?", "answer": "1"}) for i in range(before + 1)]
    train.write_text("\n".join([*first, *held, held[0]]) + "\n")


@pytest.mark.parametrize("before", [0, LOOKED_AT])
def test_overlap_is_judged_as_in_a_run(task: Path, train: Path, before: int) -> None:
    both(task, train, before)
    code, told = check(task, "data.overlap=refuse")
    assert code == 2
    assert "2 rows of validation set held_out are in training source train" in told
    assert "ok" not in told.splitlines()
    assert check(task, "data.overlap=refuse", "--fast")[0] == 0
    assert "validation looks too good" in tried(task).remarks[0]
    trial = tried(task, "data.overlap=drop")
    assert (trial.wrong, trial.remarks[1]) == ([], "data.overlap: 3 training rows are left out")
    train.write_text((task.parent / "held_out.jsonl").read_text())
    [error] = tried(task, "data.overlap=drop").wrong
    assert "all of its rows are in validation sets" in str(error)


def test_overlap_of_large_files_is_left_to_another_command(task: Path, train: Path) -> None:
    row = json.dumps({"prompt": "1", "answer": "1", "more": "x" * (LARGE_BYTES // LOOKED_AT)})
    train.write_text(f"{row}\n" * (LOOKED_AT + 1))
    trial = tried(task)
    assert trial.wrong == []
    assert [each for each in trial.untried if "roll data" in each]


def test_of_a_part_the_rows_of_all_are_counted(task: Path, train: Path) -> None:
    prompts(train, [str(number) for number in range(LOOKED_AT + 5)])
    assert "of the first " in tried(task, "data.sources.0.part=[0, 0.5]").told[0]


def test_empty_expected_answers_are_counted(task: Path, train: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": answer} for i, answer in enumerate(["1", "", " ", "4"])]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trial = tried(task)
    assert "4 of 4 rows kept" in trial.told[0]
    [remark] = trial.remarks
    assert f"2 with an empty expected answer, kept nonetheless (first: {train}:2)" in remark
    assert tried(task, "data.sources.0.columns.answer=null").remarks == []


def test_prompts_that_are_left_out_are_told(task: Path, train: Path) -> None:
    prompts(train, ["1" * 40, "2", "3"])
    trial = tried(task)
    assert "2 of 3 rows kept, the longest that fits has 3 of at most 32" in trial.told[0]
    assert "tokens, the longest of all 42" in trial.told[0]
    assert "1 left out because they are longer than max_prompt_tokens = 32" in trial.remarks[0]
    assert trial.wrong == []


def test_a_source_most_of_which_is_lost_is_refused(task: Path, train: Path) -> None:
    prompts(train, ["1" * 40, "2" * 40, "3"])
    code, told = check(task)
    assert code == 2
    assert "2 of 3 prompts are longer than max_prompt_tokens = 32 (half have at most 4" in told
    assert "pool (devices)" not in told, "no table hides it"
    assert "ok" not in told.splitlines()
    assert check(task, "--fast")[0] == 0


def test_text_that_the_tokenizer_does_not_know_is_told(task: Path, train: Path) -> None:
    prompts(train, ["1 \u00d7 2", "3"])
    code, told = check(task)
    assert code == 0
    assert "note: " in told
    assert "1 of 2 rows (50.0%) hold text that the tokenizer does not know" in told
    assert "reads '<pad>' in its place: '\u00d7' (first: " in told


def test_a_tag_of_a_row_that_nobody_takes_is_refused(task: Path, train: Path) -> None:
    train.write_text('{"prompt": "1", "answer": "1", "kind": "proof"}\n')
    code, told = check(task, "data.sources.0.columns.tag=kind", "validation.sets.held_out=null")
    assert code == 2
    assert "'proof', which no reward takes" in told


def test_a_picture_in_a_message_is_refused_where_the_engine_takes_none(
    task: Path, train: Path, tmp_path: Path
) -> None:
    picture = "data:image/png;base64," + base64.b64encode(file_of(coloured(28, 28))).decode()
    content = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": "1"}]
    train.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    seeing = save_vision_model(tmp_path, "qwen2_vl")
    columns = "data.sources.0.columns={prompt: null, messages: messages, answer: null}"
    for engine, refused in (("sglang", True), ("hf", False)):
        strategy = f"actor_infer.strategy={{kind: {engine}}}"
        wrong = tried(task, f"model.path={seeing}", columns, strategy).wrong
        assert ("has pictures" in " ".join(map(str, wrong))) == refused, wrong


def test_a_broken_row_further_down_is_found(task: Path, train: Path) -> None:
    prompts(train, ["1"] * 20)
    train.write_text(train.read_text() + '{"prompt":\n')
    assert "train.jsonl:21" in str(tried(task).wrong[0])


def test_what_is_not_on_this_machine_is_named_and_not_fetched(task: Path) -> None:
    (line,) = tried(task, "model.path=some-org/no-such-model").told
    assert line.startswith("no rows tried: the tokenizer of some-org/no-such-model is not on this")
    trial = tried(task, "data.sources=[{path: some-org/rows}]", "validation.sets.held_out=null")
    assert trial.told == ["some-org/rows: on the hub, no rows tried"]
    made = "data.sources=[{path: later.jsonl, made_by: make it}]"
    code, told = check(task, made, "validation.sets.held_out=null")
    assert code == 0
    assert "later.jsonl: not made yet, no rows tried" in told
    assert told.splitlines()[-1] == "nothing wrong in the file; it cannot run here yet"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "later"}, "Transformers does not recognize this architecture"),
        ({"num_hidden_layers": "two"}, "'num_hidden_layers' expected int, got str (value: 'two')"),
    ],
)
def test_a_model_whose_config_cannot_be_read_is_refused(
    task: Path, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    shutil.copytree(task.parent / "model", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    code, told = check(task, f"model.path={tmp_path / 'model'}")
    assert code == 2, told
    assert why in " ".join(told.split())


TURNS = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("pipeline", "row", "lost"),
    [
        ("sft", {"messages": TURNS}, {"messages": TURNS[:1]}),
        ("dpo", PAIR, {**PAIR, "rejected": "2"}),
        ("reward_model", PAIR, {**PAIR, "chosen": "", "rejected": " "}),
    ],
)
def test_rows_of_all_pipelines_are_tried(
    tmp_path: Path, pipeline: str, row: Any, lost: Any
) -> None:
    beside = {"reference": {"pool": "all"}} if pipeline == "dpo" else {}
    path = write_rows_task(tmp_path, pipeline, {"train": [row] * 3, "held_out": [row]}, **beside)
    trial = tried(path)
    assert "train.jsonl: 3 of 3 rows kept, the longest has " in trial.told[0]
    assert trial.wrong == []
    [overlap] = trial.remarks
    assert "1 rows of validation set held_out are in training source train" in overlap
    rows = [row, lost, lost]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    trial = tried(path)
    assert "only 1 of 3 rows would be trained on" in "".join(trial.remarks)
    assert trial.wrong == [], "a run trains on the one"


def test_the_template_of_the_tokenizer_is_what_is_tried(task: Path) -> None:
    saved = task.parent / "tokenizer"
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    tokenizer.save_pretrained(saved)
    assert "refuses this row: no" in str(tried(task, f"model.tokenizer={saved}").wrong[0])


DROPS_THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.slow
def test_a_chat_template_that_drops_earlier_thoughts_is_told_unless_a_key_decides(
    tmp_path: Path,
) -> None:
    told = "environments.words: the chat template drops the thoughts of earlier turns"
    path = agentic_task(tmp_path)
    assert told not in " ".join(check(path)[1].split())
    (tmp_path / "model/chat_template.jinja").write_text(DROPS_THOUGHTS)
    code, output = check(path)
    assert code == 0, output
    assert told in " ".join(output.split())
    for history in ("keep", "fork"):
        code, output = check(path, f"environments.words.history={history}")
        assert code == 0, output
        assert told not in " ".join(output.split())


def test_a_chat_template_that_cannot_render_earlier_turns_is_refused_with_fork(
    tmp_path: Path,
) -> None:
    path = agentic_task(tmp_path)
    refuses = "{% if messages|length > 1 %}{{ raise_exception('too long') }}{% endif %}"
    (tmp_path / "model/chat_template.jinja").write_text(f"{refuses}{DROPS_THOUGHTS}")
    code, output = check(path, "environments.words.history=fork")
    assert code != 0
    assert "environments.words.history: `fork`" in output
