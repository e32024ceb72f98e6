"""Examples are copied with all that they need, and never over a file of the user."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roll.cli import app
from roll.commands.begin.examples import copy_example, list_examples
from roll.config import load_config
from roll.config.errors import UserError

ROOT = Path(__file__).parents[3]
NAMES = sorted(path.parent.name for path in ROOT.glob("examples/*/README.md"))


def files_below(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_all_examples_are_listed_with_a_sentence() -> None:
    listed = list_examples()
    assert sorted(listed) == NAMES
    assert listed["rlvr_quickstart"] == "A tiny model learns to sort digits upwards"
    assert listed["recipes"] == "Recipes for models of 4 to 235 billion parameters"
    assert all(20 < len(about) < 150 for about in listed.values()), listed


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_has_all_that_its_run_files_and_commands_name(name: str, tmp_path: Path) -> None:
    copied = copy_example(name, tmp_path)
    there = files_below(tmp_path)
    assert sorted(there) == sorted(str(path.relative_to(tmp_path)) for path in copied.files)
    for path, content in there.items():
        assert content == (ROOT / path).read_bytes()
    pages = [path.read_text() for path in (tmp_path / "examples" / name).glob("*.md")]
    texts = [text.decode() for path, text in there.items() if not path.endswith(".md")]
    for text in [*texts, *pages, *copied.commands]:
        for script in re.findall(r"python (examples/\w+\.py)", text):
            assert script in there
        for module in re.findall(r"^from examples\.(\w+) import", text, re.MULTILINE):
            assert f"examples/{module}.py" in there
    for command in copied.commands:
        if command.startswith("roll run "):
            assert load_config(tmp_path / command.removeprefix("roll run ")).config.pipeline


def test_the_two_commands_of_the_readme_are_told() -> None:
    readme = (ROOT / "Makefile").read_text()
    result = CliRunner().invoke(app, ["examples", "copy", "rlvr_quickstart", str(ROOT)])
    assert result.exit_code == 0, result.output
    told = [line.strip() for line in result.output.splitlines()[1:] if " cd " not in line]
    assert told == [
        "python examples/sorting.py quickstart",
        "roll run examples/rlvr_quickstart/run.yaml",
    ]
    assert all(line.replace("python ", "").replace("roll ", "") in readme for line in told)


def test_a_file_of_the_user_is_never_overwritten(tmp_path: Path) -> None:
    copy_example("sft_sort", tmp_path)
    run = tmp_path / "examples" / "sft_sort" / "run.yaml"
    run.write_text(mine := run.read_text() + "# mine\n")
    (tmp_path / "examples" / "rlvr_custom_reward").mkdir()
    before = files_below(tmp_path)
    for name in ("sft_sort", "rlvr_quickstart"):
        with pytest.raises(UserError, match=r"sft_sort/run\.yaml: there already.*nothing was cop"):
            copy_example(name, tmp_path)
    assert files_below(tmp_path) == before
    assert run.read_text() == mine


def test_a_link_to_nowhere_is_in_the_way_too(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "sorting.py").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"sorting\.py: there already"):
        copy_example("sft_sort", tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_example_brings_only_what_is_missing(tmp_path: Path) -> None:
    copy_example("rlvr_quickstart", tmp_path)
    more = copy_example("rlvr_custom_reward", tmp_path).files
    assert {path.parent.name for path in more} == {"rlvr_custom_reward"}
    assert copy_example("rlvr_custom_reward", tmp_path).files == []


def test_an_unknown_example_is_refused_with_the_nearest(tmp_path: Path) -> None:
    command = ["examples", "copy", "rlvr_quikstart", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "did you mean 'rlvr_quickstart'" in result.output
    assert list(tmp_path.iterdir()) == []
