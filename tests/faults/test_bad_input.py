"""Everything a user can get wrong ends in one clear message and exit code 2, before Ray starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from roll.cli import app
from tests.runs import write_task


def answer(path: Path, *overrides: str, command: str = "run") -> str:
    """The message of a refused command; it must be short and without a traceback."""
    result = CliRunner().invoke(app, [command, str(path), *overrides])
    text = " ".join(result.output.split())
    assert result.exit_code == 2, text
    assert "Traceback" not in text
    assert len(result.output.splitlines()) <= 30
    return text


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path)


def test_a_typo_in_a_key(task: Path) -> None:
    message = answer(task, "actor_train.optimizer.learning_rate=1", "max_step=3")
    assert "max_step = 3: unknown key; did you mean 'max_steps'?" in message


def test_a_value_out_of_range(task: Path) -> None:
    assert "sampling.top_p = 2: input should be less than or equal to 1" in answer(
        task, "sampling.top_p=2"
    )


def test_a_batch_that_does_not_divide(task: Path) -> None:
    assert "does not divide the 16 samples" in answer(task, "actor_train.samples_per_update=5")


def test_a_missing_file(task: Path) -> None:
    assert "did you mean 'train.jsonl'?" in answer(
        task, f"data.sources.0.path={task.parent / 'tran.jsonl'}"
    )


def test_a_malformed_row(task: Path) -> None:
    with (task.parent / "train.jsonl").open("a") as file:
        file.write('{"prompt": "1", "answer":\n')
    assert "train.jsonl:17" in answer(task)


def test_a_missing_column(task: Path) -> None:
    message = answer(task, "data.sources.0.columns.prompt=promt")
    assert "'promt'" in message
    assert "did you mean 'prompt'?" in message


def test_an_empty_dataset(task: Path) -> None:
    (task.parent / "train.jsonl").write_text("")
    assert "no rows" in answer(task)


def test_a_model_that_does_not_exist(task: Path) -> None:
    assert "does not exist" in answer(task, "model.path=./nowhere")


def test_a_model_that_is_still_to_be_made_names_the_command(task: Path) -> None:
    message = answer(task, "model={path: ./nowhere, made_by: make it}")
    assert "make it with: make it" in message


def test_a_folder_that_is_no_model(task: Path) -> None:
    assert "no config.json" in answer(task, f"model.path={task.parent}")


def test_a_pool_larger_than_the_machine(task: Path) -> None:
    message = answer(task, "pools.all=0-511", "data.prompts_per_step=512")
    assert "device 511" in message


def test_a_cuda_run_without_a_gpu(task: Path) -> None:
    assert "no NVIDIA GPU" in answer(task, "cluster.platform=cuda")


def test_a_tag_without_a_reward(task: Path) -> None:
    message = answer(task, "data.sources.0.tag=maths")
    assert "no reward takes the tag 'maths'" in message


def test_an_unknown_reward(task: Path) -> None:
    assert "did you mean 'math'?" in answer(task, "rewards.digits.fn=maths")


def test_a_reward_module_that_does_not_exist(task: Path) -> None:
    assert "no module named 'my_rewards'" in answer(task, "rewards.digits.fn=my_rewards:f")


def test_a_built_in_reward_that_does_not_exist_fails_the_check(task: Path) -> None:
    message = answer(task, "rewards.digits.fn=maths", command="check")
    assert "unknown reward 'maths'; did you mean 'math'?" in message


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("{fn: 'test_run_rewards:digit'}", "has no 'digit'; did you mean 'digits'?"),
        ("{fn: null, worker: 'test_run_rewards:Owners'}", "did you mean 'Owner'?"),
        ("{fn: 'test_run_rewards.more:f'}", "no module named 'test_run_rewards.more'"),
        ("{fn: 'broken:f'}", "is not valid Python"),
        ("{fn: null, worker: Owner}", "must read 'package.module:name'"),
    ],
)
def test_a_reward_that_is_not_in_its_module_fails_the_check(
    task: Path, reward: str, message: str
) -> None:
    (task.parent / "broken.py").write_text("def f(:\n")
    assert message in answer(task, f"rewards.digits={reward}", command="check")


def test_a_resume_path_that_is_no_checkpoint(task: Path) -> None:
    assert "no complete checkpoint" in answer(task, "resume=/nowhere")


def test_check_refuses_the_same_without_running(task: Path) -> None:
    assert "does not exist" in answer(task, "model.path=./nowhere", command="check")
    assert "no rows" in answer(_emptied(task), command="check")


def _emptied(task: Path) -> Path:
    (task.parent / "train.jsonl").write_text("")
    return task


def test_an_engine_that_is_not_installed_names_what_brings_it() -> None:
    from packaging.specifiers import SpecifierSet

    from roll.core.errors import EngineMissingError
    from roll.strategy.available import Requirement, check_engine

    missing = Requirement(("no-such-engine",), SpecifierSet(">=1"), "pip install no-such-engine")
    with pytest.raises(EngineMissingError, match="pip install no-such-engine"):
        check_engine("nse", missing)
    old = Requirement(("pytest",), SpecifierSet(">=1000"), "pip install pytest")
    with pytest.raises(EngineMissingError, match="outside >=1000"):
        check_engine("old", old)
