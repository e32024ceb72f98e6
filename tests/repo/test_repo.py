"""The rules of CONTRIBUTING that a tool can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import grimp
import pytest
from transformers.utils import import_utils

from roll.config import PIPELINES, load_config

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for d in ("roll", "mcore_adapter") for p in (ROOT / d).rglob("*.py"))
EXAMPLES = sorted(ROOT.glob("examples/*/*.yaml"))
MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS, MAX_MODULES = 400, 60, 9, 15
MAX_FOREIGN = 700


CHECK_ALL = """
import sys
from roll.cli import app
for path in sys.argv[1:]:
    try: app(["check", "--fast", path])
    except SystemExit as end: assert not end.code, path
    heavy = {"torch", "ray", "transformers", "vllm", "sglang", "datasets"} & set(sys.modules)
    assert not heavy, f"{path}: imported {heavy}"
foreign = [name for name in sys.modules if name.partition(".")[0] != "roll"]
assert len(foreign) < MAX_FOREIGN, f"imported {len(foreign)} modules that are not ours"
"""


@pytest.mark.slow
def test_every_example_is_checked_with_light_imports() -> None:
    """How long a check takes is measured by benchmarks/check_time.py."""
    code = CHECK_ALL.replace("MAX_FOREIGN", str(MAX_FOREIGN))
    paths = [str(path.relative_to(ROOT)) for path in EXAMPLES]
    command = [sys.executable, "-c", code, *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_example_is_valid(path: Path) -> None:
    assert load_config(path).config.pipeline in PIPELINES


def test_every_file_of_the_examples_is_checked_in_images_too() -> None:
    files = (ROOT / "examples").rglob("*.y*ml")
    told = {path.name for path in files if path.parent.name != "shared"}  # parts of run files
    assert told == {path.name for path in EXAMPLES}
    assert len(EXAMPLES) >= 9
    for image in (ROOT / "docker").glob("*.Dockerfile"):
        assert "for run in examples/*/*.yaml" in image.read_text(), image


def test_no_folder_holds_more_modules_than_a_reader_takes_in() -> None:
    files = [*SOURCES, *ROOT.glob("tests/unit/**/*.py")]
    modules = Counter(path.parent.relative_to(ROOT) for path in files)
    assert {str(room): n for room, n in modules.items() if n > MAX_MODULES} == {}


def test_no_module_imports_itself_through_others() -> None:
    """Imports for type checkers count, and those inside of functions."""
    graph = grimp.build_graph("roll", "mcore_adapter", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # a CycleError names the modules of a circle


def test_importing_the_config_loads_nothing_heavy() -> None:
    code = "import sys, roll.config; print(sorted({'torch', 'ray', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_worker_without_tensors_loads_no_torch() -> None:
    """It would take 130 MB of every reward's process."""
    code = (
        "import sys, roll.distributed.on_ray.host, roll.workers.reward\n"
        "from roll.platform import get_platform\n"
        "for platform in map(get_platform, ('cpu', 'cuda')):\n"
        "    platform.set_threads(1); platform.destroy()\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_files_and_functions_stay_small() -> None:
    too_big = []
    for path in SOURCES:
        text = path.read_text()
        if text.count("\n") > MAX_FILE:
            too_big.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                arguments = len(node.args.args) + len(node.args.kwonlyargs)
                if lines > MAX_FUNCTION or arguments > MAX_ARGUMENTS:
                    where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
                    too_big.append(f"{where}: {lines} lines, {arguments} arguments")
    assert not too_big, "\n".join(too_big)


def test_docstrings_begin_with_what_they_are_about() -> None:
    """Those that begin with `Of the ...` or `Whether ...` are riddles without the code at hand."""
    riddles = {"Of", "What", "How", "Whether", "Where", "As", "Which", "Who", "Whose", "When"}
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if text.split()[0] in riddles
    ]
    assert not found, "\n".join(found)


def test_the_environment_is_written_in_few_places() -> None:
    allowed = re.compile(
        r"(roll/(distributed/on_ray/environment|strategy/\w+/(zero_)?engine|data/store/workers"
        r"|models/kernels/compiled|weight_sync/transports/process_groups)|.*mcore_adapter/platform)\.py"
    )
    pattern = re.compile(r"os\.(environ\[[^]]+\]\s*=|environ\.(setdefault|update|pop)|putenv)")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in SOURCES
        for match in pattern.finditer(path.read_text())
        if not allowed.fullmatch(str(path.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


def test_no_imported_module_is_patched() -> None:
    """No assignment to an attribute of an imported name, outside of compat files."""
    found = []
    for path in SOURCES:
        if path.name == "compat.py":
            continue
        tree = ast.parse(path.read_text())
        modules = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign):
                continue
            for root in node.targets:
                is_attribute = isinstance(root, ast.Attribute)
                while isinstance(root, ast.Attribute):
                    root = root.value
                if is_attribute and isinstance(root, ast.Name) and root.id in modules:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, "\n".join(found)


def test_nothing_is_left_for_later() -> None:
    pattern = re.compile(r"raise NotImplementedError|\bFIXME\b|\bTODO\b(?!\()")
    found = [str(p.relative_to(ROOT)) for p in SOURCES if pattern.search(p.read_text())]
    assert not found


def test_the_readme_names_only_targets_and_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", readme, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / link).exists(), link


def test_no_module_beside_a_script_is_taken_for_a_package() -> None:
    """The folder of a script comes first where Python looks for modules: a `kernels.py` there is
    what transformers finds where it asks whether the package `kernels` is installed."""
    asked = Path(import_utils.__file__).read_text()
    packages = {*packages_distributions(), *sys.stdlib_module_names}
    packages |= set(re.findall(r'_is_package_available\("(\w+)', asked))
    assert "kernels" in packages
    modules = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/**/*.py")]
    folders = {p.parent for p in modules if '__name__ == "__main__"' in p.read_text()}
    hiding = [p for p in modules if p.parent in folders and p.stem in packages - {"__init__"}]
    assert not hiding
