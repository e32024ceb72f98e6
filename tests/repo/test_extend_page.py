"""Every example of docs/extend.md is read as a user's, and keeps the contract of its kind."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.config import load_config
from tests.runs import write_task

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
MODULES = {
    code.splitlines()[0].removeprefix("# "): code
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}
"""File name -> code."""
SETTINGS: list[dict[str, Any]] = [
    yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a run file and every module of the page."""
    write_task(tmp_path)
    for name, code in MODULES.items():
        (tmp_path / name).write_text(code)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)


def merged(below: Any, over: Any) -> Any:
    """Mappings are merged, other values replaced, as files over `defaults` are."""
    if not (isinstance(below, dict) and isinstance(over, dict)):
        return over
    return below | {key: merged(below.get(key), value) for key, value in over.items()}


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_every_run_file_of_the_page_is_valid(folder: Path, number: int) -> None:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(merged(yaml.safe_load(path.read_text()), SETTINGS[number])))
    load_config(path)
