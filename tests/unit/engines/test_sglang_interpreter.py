"""SGLang in a Python of its own: what is asked of it, and what is refused."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from roll.config.sections.engines import HfEngineConfig, SglangConfig
from roll.core.errors import EngineMissingError
from roll.strategy.installed import check_backend
from roll.strategy.sglang.interpreter import NEEDED, check_sglang, code_path, package_folder
from tests.other_python import make_python

ROOT = Path(__file__).parents[3]


def with_packages(folder: Path, version: str) -> str:
    """A Python whose packages are empty folders, and whose SGLang claims a version."""
    packages = folder / "packages"
    for name in NEEDED:
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
    about = packages / f"sglang-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return make_python(folder / "python", packages)


def test_a_supported_version_in_another_python_is_enough(tmp_path: Path) -> None:
    python = with_packages(tmp_path, "0.5.23")
    check_backend(SglangConfig(python=python))
    assert package_folder(python) == tmp_path / "packages" / "sglang"


def test_another_version_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    python = with_packages(tmp_path, "0.4.9")
    with pytest.raises(EngineMissingError, match=r"sglang 0\.4\.9 of .* is outside") as refused:
        check_backend(SglangConfig(python=python))
    assert f"uv pip install --python {python} 'sglang==0.5.23' omegaconf" in str(refused.value)


def test_what_is_missing_there_is_named(tmp_path: Path) -> None:
    python = make_python(tmp_path / "python")
    with pytest.raises(EngineMissingError, match="lacks sglang, torch, transformers, numpy, pydan"):
        check_sglang(python)


@pytest.mark.parametrize("python", ["/nowhere/bin/python", "/bin/false", "/bin/echo", "/tmp"])
def test_what_is_no_python_is_refused(python: str) -> None:
    with pytest.raises(EngineMissingError, match=f"strategy.python: {python} does not run as"):
        check_sglang(python)


def test_an_empty_path_is_refused_and_other_engines_ask_no_python() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        SglangConfig(python="")
    check_backend(HfEngineConfig())


def test_another_python_finds_this_framework_and_nothing_else_of_its_environment(
    tmp_path: Path,
) -> None:
    python = make_python(tmp_path / "python")
    path = code_path(tmp_path, "")
    code = "import importlib.util as u; print(u.find_spec('roll').origin, u.find_spec('torch'))"
    asked = [python, "-c", code]
    done = subprocess.run(asked, env={"PYTHONPATH": path}, capture_output=True, text=True)
    found, torch = done.stdout.split()
    assert Path(found).resolve() == ROOT / "roll" / "__init__.py"
    assert torch == "None"


def test_the_process_of_sglang_imports_no_other_package_than_those_that_are_asked_for() -> None:
    packages, seen, todo = set(), set(), ["roll.strategy.sglang.server"]
    while todo:
        name = todo.pop()
        path = ROOT.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not file.exists():  # a function or class of a module
            continue
        seen.add(name)
        for found in [name.rpartition(".")[0], *imported(file)]:
            if found.partition(".")[0] == "roll":
                todo.append(found)
            elif found:
                packages.add(found.partition(".")[0])
    assert {"torch", "omegaconf"} <= packages
    # pydantic_core comes with pydantic.
    assert packages - set(sys.stdlib_module_names) - {"pydantic_core"} <= NEEDED.keys()


def imported(file: Path) -> list[str]:
    """Names that a module imports when it is imported, with those inside of other modules."""
    found = []
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.Import(names=names):
                found += [each.name for each in names]
            case ast.ImportFrom(module=str(name), names=names, level=0):
                found += [name, *(f"{name}.{each.name}" for each in names)]
    return found
