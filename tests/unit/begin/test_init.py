"""`roll init` writes run files that `roll check` takes, or says why it cannot."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from typer.testing import CliRunner

from roll.cli import app
from roll.commands.begin.answers import Questions
from roll.commands.begin.columns import likely_columns, likely_pipeline, look_at
from roll.commands.begin.init import write_run_file
from roll.commands.begin.run_file import quoted
from roll.config import PIPELINES, load_config
from roll.config.errors import UserError
from roll.config.offline import DpoConfig
from roll.config.rlvr import RlvrConfig
from tests.tiny import save_tiny_model

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ROWS: dict[str, dict[str, Any]] = {
    "asked": {"id": 7, "question": "1 + 1", "solution": "#### 2", "level": "easy"},
    "talked": {"conversations": TALK},
    "completed": {"instruction": "say hi", "response": "hi"},
    "preferred": {"Prompt": "say hi", "chosen": "hi", "rejected": "no"},
    "rated": {"prompt": "say hi", "completion": "hi", "label": True},
    "odd": {"yes": "1 + 1", "a: b, {c}": "2"},
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, row in ROWS.items():
            (folder / f"{kind}.jsonl").write_text(json.dumps(row) + "\n")
        with (folder / "asked.csv").open("w") as file:
            csv.writer(file).writerows([["problem", "answer"], ["1 + 1", "2"]])
        (folder / "empty.jsonl").write_text("")
        (folder / "my_rewards.py").write_text("def fine(sample):\n    return 1.0\n")
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "model" / "pytorch_model.bin").touch()
        (folder / "nothing").mkdir()
        yield folder


def init(out: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["init", *arguments, "--out", str(out)])
    return result.exit_code, result.output


def checked(out: Path) -> str:
    result = CliRunner().invoke(app, ["check", "--fast", str(out)])
    assert result.exit_code == 0, result.output + out.read_text()
    return result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipeline", "data", "reward"),
    [
        ("rlvr", "asked.jsonl", None),
        ("rlvr", "asked.csv", "exact"),
        ("rlvr", "asked.jsonl", "my_rewards:fine"),
        ("agentic", "500", "frozen_lake"),
        ("agentic", "asked.jsonl", "calculator"),
        ("sft", "talked.jsonl", None),
        ("sft", "completed.jsonl", None),
        ("distill", "completed.jsonl", "Qwen/Qwen3-8B"),
        ("dpo", "preferred.jsonl", None),
        ("dpo", "rated.jsonl", None),
        ("reward_model", "preferred.jsonl", None),
    ],
)
@pytest.mark.parametrize("gpus", [0, 1, 2, 7])
def test_a_run_file_of_each_pipeline_passes_the_check(
    pipeline: str, data: str, reward: str | None, gpus: int, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "my_rewards.py").write_text((folder / "my_rewards.py").read_text())
    out = tmp_path / "mine.yaml"
    source = data if data.isdecimal() else str(folder / data)
    flags = ["--model", str(folder / "model"), "--data", source, "--pipeline", pipeline]
    flags += ["--reward", reward] if reward else []
    kind = "hf" if pipeline in ("rlvr", "agentic") else "fsdp2"
    code, told = init(out, *flags, "--engine", f"{kind}:{gpus}", "--yes")
    assert code == 0, told
    look = [] if pipeline == "agentic" else ["data"]
    after = [line.split()[1] for line in told.splitlines() if line.startswith("  roll ")]
    assert after == ["check", *look, "try", "run"]
    told = checked(out)
    assert "ok, with" in told or gpus, told
    config = load_config(out, ["max_steps=1"]).config  # no warm-up is longer than a short run
    assert config.pipeline == pipeline
    assert config.output_dir == "outputs/mine"
    assert config.cluster.platform == ("cuda" if gpus else "cpu")  # also on a machine with GPUs
    assert sum(" # " in line for line in out.read_text().splitlines()) >= 3
    assert {device for role in config.roles for device in range(config.num_devices(role))} <= {
        *range(max(1, gpus))
    }


def test_columns_are_proposed_by_the_first_row(folder: Path) -> None:
    found = {
        kind: (likely_pipeline(data := look_at(str(folder / f"{kind}.jsonl"))), data)
        for kind in ROWS
        if kind != "odd"
    }
    assert {kind: (name, likely_columns(name, data)) for kind, (name, data) in found.items()} == {
        "asked": ("rlvr", {"prompt": "question", "answer": "solution"}),
        "talked": ("sft", {"messages": "conversations"}),
        "completed": ("sft", {"completion": "response", "prompt": "instruction"}),
        "preferred": ("dpo", {"chosen": "chosen", "rejected": "rejected", "prompt": "Prompt"}),
        "rated": ("dpo", {"completion": "completion", "label": "label", "prompt": "prompt"}),
    }


def test_proposals_end_in_the_file(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    assert init(out, "--model", "a/b", "--data", str(folder / "asked.jsonl"), "--yes")[0] == 0
    config = load_config(out).config
    assert isinstance(config, RlvrConfig)
    source = config.data.sources[0]
    assert (source.columns.prompt, source.columns.answer) == ("question", "solution")
    assert config.rewards["main"].fn == "math"
    assert "# Rewards also see: id, level" in out.read_text()
    out = tmp_path / "kto.yaml"
    assert init(out, "--model", "a/b", "--data", str(folder / "rated.jsonl"), "--yes")[0] == 0
    config = load_config(out).config
    assert isinstance(config, DpoConfig)
    assert config.loss.kind == "kto"


@pytest.mark.parametrize("pipeline", list(PIPELINES))
def test_with_its_comments_the_file_holds_out_a_part_of_the_rows(
    pipeline: str, folder: Path, tmp_path: Path
) -> None:
    kinds = {
        "sft": "talked",
        "distill": "completed",
        "dpo": "preferred",
        "reward_model": "preferred",
    }
    data = folder / f"{kinds.get(pipeline, 'asked')}.jsonl"
    out = tmp_path / "run.yaml"
    flags = ["--model", "a/b", "--data", str(data), "--pipeline", pipeline]
    if pipeline in ("agentic", "distill"):
        flags += ["--reward", {"agentic": "calculator", "distill": "a/c"}[pipeline]]
    code, told = init(out, *flags, "--yes")
    assert code == 0, told
    before, _, after = out.read_text().partition("# validation:")
    begun = before.replace("# part:", "part:")
    assert begun != before
    uncommented = "".join(line.removeprefix("# ") + "\n" for line in after.splitlines()[1:4])
    rest = "\n".join(after.splitlines()[4:])
    out.write_text(f"{begun}validation:\n{uncommented}{rest}\n")
    config: Any = load_config(out).config
    [source], held_out = config.data.sources, config.validation.sets["held_out"]
    assert (source.part, held_out.part) == ((0, 0.98), (0.98, 1))
    assert held_out.path == source.path == str(data)
    assert held_out.columns == source.columns


@pytest.mark.parametrize(
    ("row", "kwargs"),
    [
        ({"options": ["red", "blue"], "answer": "B"}, {"choices": "options"}),
        ({"options": ["red", "blue"], "answer": "blue"}, {"choices": "options", "truth": "text"}),
        ({"choices": ["red", "blue"], "answer": 1}, {"truth": "index"}),
        ({"choices": {"label": ["A"], "text": ["red"]}, "answer": "A"}, {}),
    ],
)
def test_options_are_found_where_they_are(
    row: dict[str, Any], kwargs: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Which?", **row}))
    out = tmp_path / "run.yaml"
    code, told = init(out, "--model", "a/b", "--data", str(tmp_path / "rows.jsonl"), "--yes")
    assert code == 0, told
    config = load_config(out).config
    assert isinstance(config, RlvrConfig)
    assert (config.rewards["main"].fn, config.rewards["main"].kwargs) == ("multiple_choice", kwargs)
    checked(out)


def test_columns_with_odd_names_are_quoted(folder: Path, tmp_path: Path) -> None:
    row = {"yes": "1 + 1", "12": "2", "null": "x"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    out = tmp_path / "run.yaml"
    flags = ["--model", "a/b", "--data", str(tmp_path / "rows.jsonl"), "--pipeline", "rlvr"]
    code, told = init(
        out, *flags, "--columns", "prompt=yes,answer=12", "--reward", "exact", "--yes"
    )
    assert code == 0, told
    source = yaml.safe_load(out.read_text())["data"]["sources"][0]
    assert source["columns"] == {"prompt": "yes", "answer": "12"}


@given(st.text(min_size=1).filter(str.isprintable))
def test_a_quoted_text_is_read_as_it_was(text: str) -> None:
    assert yaml.safe_load(f"a: {{b: {quoted(text)}}}") == {"a": {"b": text}}
    assert yaml.safe_load(f"a: {quoted(text)}   # a comment") == {"a": text}


@given(st.text("0123456789eE-+._:", min_size=1, max_size=6))
@example(".5e-3")
def test_a_quoted_text_is_no_number_in_a_run_file(text: str) -> None:
    found = OmegaConf.to_container(OmegaConf.create(f"a: {{b: {quoted(text)}}}"))
    assert found == {"a": {"b": text}}


def test_without_a_terminal_what_is_missing_is_named(tmp_path: Path) -> None:
    code, told = init(tmp_path / "run.yaml")
    assert code == 2
    assert "--model is missing, and there is no terminal to ask at: give --model, --data," in told
    code, told = init(tmp_path / "run.yaml", "--yes")
    assert code == 2
    assert "--model is missing, and nothing is proposed for it" in told
    assert list(tmp_path.iterdir()) == []


def test_rows_that_fit_no_pipeline_tell_what_each_wants(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"frage": "1+1=", "gut": "2", "schlecht": "3"}\n')
    with pytest.raises(UserError) as caught:
        likely_columns("rlvr", look_at(str(path)))
    told = str(caught.value)
    assert "of pipeline rlvr (columns: frage, gut, schlecht); name them: --columns " in told
    assert (
        "another --pipeline, too (sft, distill: messages=COLUMN or prompt=COLUMN,completion" in told
    )
    assert "; dpo: prompt=COLUMN,chosen=COLUMN,rejected=COLUMN or prompt=COLUMN,completion" in told
    assert "agentic" not in told, "it reads the same columns"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--pipeline", "dqo"], "'dqo' is unknown; did you mean 'dpo'?"),
        (["--pipeline", "dpo"], r"no columns look like those of pipeline dpo"),
        (["--pipeline", "sft", "--reward", "math"], "pipeline sft learns from its rows alone"),
        (["--columns", "prompt=qestion"], "no column 'qestion'; did you mean 'question'?"),
        (["--columns", "promt=question"], "reads no 'promt'; did you mean 'prompt'?"),
        (["--engine", "vlm"], "--engine: 'vlm' is unknown; did you mean 'vllm'?"),
        (["--columns", "prompt=question", "--reward", "exact"], "compares with the right answer"),
        (["--reward", "exakt"], "'exakt' is unknown; did you mean 'exact'?"),
        (["--reward", "my_moon:fn"], "rewards.main.fn"),
        (["--engine", "fsdp2"], "'fsdp2' is unknown"),
        (["--model", "nothing"], "no Hugging Face checkpoint"),
        (["--data", "500", "--pipeline", "rlvr"], "a number of tasks is for agentic"),
        (["--data", "500"], "--reward is missing"),
    ],
)
def test_a_wrong_option_is_refused_with_what_to_do(
    flags: list[str], told: str, folder: Path, tmp_path: Path
) -> None:
    base = {"--model": str(folder / "model"), "--data": str(folder / "asked.jsonl")}
    base |= dict(zip(flags[::2], flags[1::2], strict=True))
    if base["--model"] == "nothing":
        base["--model"] = str(folder / "nothing")
    code, output = init(tmp_path / "run.yaml", *(x for pair in base.items() for x in pair), "--yes")
    assert code == 2
    assert told in output
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_stays(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    code, told = init(out, "--model", "a/b", "--data", str(folder / "asked.jsonl"), "--yes")
    assert code == 2
    assert "exists already" in told
    assert out.read_text() == "mine"


def test_a_wrong_answer_is_asked_for_once_more(folder: Path, tmp_path: Path) -> None:
    said = iter(
        [
            "no such folder!",
            "a/b",
            str(folder / "asked.jsonl"),
            "",
            "",
            "exakt",
            "exact",
            "hf:x",
            "hf",
        ]
    )
    asked, told = list[tuple[str, str | None]](), list[str]()

    def ask(question: str, proposal: str | None) -> str:
        asked.append((question.partition(":")[0].partition(" ")[0], proposal))
        return next(said) or proposal or ""

    questions = Questions(dict.fromkeys(["model", "data"]), ask, False, told.append)
    write_run_file(questions, 0, tmp_path / "run.yaml")
    assert asked == [
        *[("Model", None)] * 2,
        ("Data", None),
        ("Pipeline", "rlvr"),
        ("Columns", "prompt=question,answer=solution"),
        *[("Reward", "math")] * 2,
        *[("Engine", "vllm:0")] * 2,
    ]
    assert len(told) == 3
    checked(tmp_path / "run.yaml")


def test_questions_are_asked_at_a_terminal(folder: Path, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "roll.cli", "init", "--out", str(tmp_path / "run.yaml")]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, f"a/b\n{folder / 'asked.jsonl'}\n\n\n\n\n".encode())
    assert process.wait(timeout=60) == 0, os.read(ours, 10_000).decode()
    os.close(ours)
    assert load_config(tmp_path / "run.yaml").config.model.path == "a/b"
    checked(tmp_path / "run.yaml")


BASES: list[dict[str, str]] = [
    {"--pipeline": "rlvr", "--data": "asked.jsonl"},
    {"--pipeline": "rlvr", "--data": "asked.csv", "--reward": "my_rewards:fine"},
    {"--pipeline": "agentic", "--data": "9", "--reward": "frozen_lake"},
    {"--pipeline": "agentic", "--data": "asked.jsonl", "--reward": "calculator"},
    {"--pipeline": "sft", "--data": "talked.jsonl"},
    {"--pipeline": "distill", "--data": "completed.jsonl", "--reward": "a/c"},
    {"--pipeline": "dpo", "--data": "preferred.jsonl"},
    {"--pipeline": "reward_model", "--data": "preferred.jsonl"},
    {},
]
CHANGES: dict[str, list[str]] = {
    "--model": ["model", "nothing", "none/there", "a b", "", "${seed}", "a/b: c", "#x"],
    "--data": [
        *(f"{kind}.jsonl" for kind in ROWS),
        *("asked.csv", "empty.jsonl", "no.jsonl", "9", "0", "org/set", "nothing", ".", "\x00"),
    ],
    "--pipeline": [*PIPELINES, "dqo"],
    "--columns": [
        *("prompt=question", "prompt=question,answer=solution", "completion=response"),
        *("messages=conversations", "answer=null", "prompt", "a=b", "chosen=chosen", "=", ""),
        *("prompt=yes,answer=a: b", "completion=completion,label=label,chosen=null,rejected=null"),
    ],
    "--reward": [
        *("math", "code", "pattern", "detection", "multiple_choice", "frozen_lake", "tools"),
        *("my_rewards:fine", "no_such:fn", "self_play", "a/b", "http://x", "gymnasium:A-v0", "é:ü"),
    ],
    "--engine": [
        *(
            "vllm",
            "sglang",
            "hf",
            "fsdp2",
            "deepspeed",
            "megatron",
            "x",
            "hf:3",
            "vllm:8",
            "vllm:x",
        ),
        *("vllm:64", "fsdp2:1", "fsdp2:6", "deepspeed:2", "megatron:3"),
    ],
}
ONE = st.sampled_from([(key, value) for key, values in CHANGES.items() for value in values])


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(BASES), st.lists(ONE, max_size=3))
def test_any_mix_of_options_is_refused_or_passes_the_check(
    folder: Path, base: dict[str, str], changes: list[tuple[str, str]]
) -> None:
    flags = {"--model": "a/b"} | base | dict(changes)
    for key in ("--model", "--data"):
        if (name := flags.get(key)) and "\x00" not in name and (folder / name).exists():
            flags[key] = str(folder / name)
    out = folder / "made.yaml"
    try:
        code, told = init(out, *(word for pair in flags.items() for word in pair), "--yes")
        assert code in (0, 2), told
        assert out.exists() == (code == 0)
        assert code == 0 or changes or not base, told
        if code == 0:
            checked(out)
        else:
            assert "Error: " in told
            assert len(told) < 1000
    finally:
        out.unlink(missing_ok=True)


@pytest.mark.slow
def test_the_check_also_tries_the_rows(folder: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    out = tmp_path / "run.yaml"
    data = str(folder / "asked.jsonl")
    assert init(out, "--model", str(tmp_path / "model"), "--data", data, "--yes")[0] == 0
    result = CliRunner().invoke(app, ["check", str(out), "actor_infer.strategy.kind=hf"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("ok"), result.output


def test_an_answer_at_the_end_of_input_is_refused(tmp_path: Path) -> None:
    questions = Questions({}, None, False)
    with pytest.raises(UserError, match="--model is missing"):
        write_run_file(questions, 0, tmp_path / "run.yaml")
