"""The wheels work where the repository is not."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.packages.wheels import ROOT, Installed, build_wheels

pytestmark = pytest.mark.slow
MAKE = """
from pathlib import Path
from examples.sorting import make_model, upwards, write_both
out = Path("outputs/quickstart")
write_both(out, 0, lambda p: {"prompt": p, "answer": upwards(p)})
make_model(out / "model")
"""
"""Model and data of the quickstart, without the training that comes first there."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def here(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment with the wheels, and the quickstart in its folder."""
    installed = Installed.make(tmp_path_factory.mktemp("installed"), wheels)
    installed.run("roll", "examples", "copy", "rlvr_quickstart")
    return installed


def files_of(folder: Path) -> set[str]:
    """Every file below a folder of the repository, by its path there; no caches."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder))
        for path in files
        if path.suffix not in (".pyc", ".pyo") and ".egg-info" not in str(path)
    }


def test_a_wheel_has_every_file_of_its_package_and_the_examples(wheels: list[Path]) -> None:
    names = [set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels]
    wanted = {f"roll/{name}" for name in files_of(ROOT / "roll")}
    wanted |= {f"roll/examples/{name}" for name in files_of(ROOT / "examples")}
    assert {name for name in names[0] if ".dist-info/" not in name} == wanted
    wanted = {f"mcore_adapter/{n}" for n in files_of(ROOT / "mcore_adapter/src/mcore_adapter")}
    assert {name for name in names[1] if ".dist-info/" not in name} == wanted
    assert "roll/py.typed" in names[0]
    assert "mcore_adapter/py.typed" in names[1]


def test_the_repository_is_not_there(here: Installed) -> None:
    code = "import roll, mcore_adapter; print(roll.__file__, mcore_adapter.__file__)"
    for file in here.run("python", "-c", code).split():
        assert Path(file).is_relative_to(here.folder)
    assert "No module named 'tests'" in here.run("python", "-c", "import tests", code=1)


def test_the_commands_tell_their_version_and_complete_words(here: Installed) -> None:
    assert here.run("roll", "--version") == "roll 0.1.0\n"
    assert here.run("mcore-adapter", "--version") == "mcore-adapter 0.1.0\n"
    assert "Post-train language models" in here.run("roll", "--help")
    assert "Megatron" in here.run("mcore-adapter", "--help")
    words = {"COMP_WORDS": "roll che", "COMP_CWORD": "1", "_ROLL_COMPLETE": "complete_bash"}
    asked = Installed(here.folder, here.work, {**here.environ, **words})
    assert asked.run("roll").split() == ["check"]


def test_a_script_of_the_examples_works_in_the_copy(here: Installed) -> None:
    assert "rlvr_gsm8k" in here.run("roll", "examples", "list")
    assert "a model and its data" in here.run("python", "examples/sorting.py", "sft")
    assert "\nok" in here.run("roll", "check", "examples/sft_sort/run.yaml")


def test_the_quickstart_runs_and_is_reported(here: Installed) -> None:
    run = "examples/rlvr_quickstart/run.yaml"
    here.run("python", "-c", MAKE)
    assert "fsdp2" in here.run("roll", "doctor")
    assert "ok" in here.run("roll", "check", run)
    assert "kind: ppo_clip" in here.run("roll", "show", run)
    here.run("roll", "run", run, "max_steps=2", "validation.every=2", "checkpoint.every=2")
    rows, model = "outputs/quickstart/train.jsonl", "outputs/quickstart/model"
    here.run("roll", "init", "--model", model, "--data", rows, "--engine", "vllm:0", "--yes")
    assert "ok" in here.run("roll", "check", "run.yaml", "sampling.max_new_tokens=8")
    out = here.work / "outputs" / "quickstart" / "run"
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {record["step"] for record in records} >= {0, 1}
    page = Path(here.run("roll", "report", str(out)).strip())
    assert page.stat().st_size > 10_000
