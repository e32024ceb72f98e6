"""The sandbox can be used without the rest of roll, and runs where nothing else is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SANDBOX = ROOT / "roll" / "sandbox"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the level (dots) and the name of each module that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""


def test_it_imports_itself_and_the_standard_library() -> None:
    paths = sorted(SANDBOX.rglob("*.py"))
    assert len(paths) > 20
    for path in paths:
        for level, name in imports(path):
            inside = level > 0 or name == "roll.sandbox" or name.startswith("roll.sandbox.")
            assert inside or name.partition(".")[0] in sys.stdlib_module_names, (path, name)


def test_each_process_imports_nothing_of_the_one_above() -> None:
    """The worker starts without `roll` on its path, the template without the worker's folder."""
    for folder in (SANDBOX / "worker", SANDBOX / "worker" / "inside"):
        for path in folder.rglob("*.py"):
            depth = len(path.relative_to(folder).parts)
            for level, name in imports(path):
                assert level <= depth, (path, name)
                assert not name.startswith("roll"), (path, name)


def test_importing_it_loads_nothing_of_roll() -> None:
    code = (
        "import sys, roll.sandbox\n"
        "print(sorted(n for n in sys.modules if n.startswith('roll.')"
        " and not n.startswith('roll.sandbox')), 'torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[] False False", done
