"""The pages are what the code says today."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import roll.extend
from docs import generate_config, generate_types

ROOT = Path(__file__).parents[2]


def test_the_page_of_algorithms_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    found = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert found == made["text"](), "run: python docs/generate.py"


def test_the_page_of_models_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate_models.py"))
    found = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert found == made["text"](), "run: python -m docs.generate_models"


def test_the_reference_of_keys_is_up_to_date() -> None:
    files = generate_config.FOLDER.glob("*")
    found = {path.name: path.read_text(encoding="utf-8") for path in files}
    assert found == generate_config.pages(), "run: python -m docs.generate_config"


def test_the_page_of_types_is_up_to_date() -> None:
    found = generate_types.TARGET.read_text(encoding="utf-8")
    assert found == generate_types.text(), "run: python -m docs.generate_types"


def test_every_type_for_users_is_on_the_page_and_every_field_has_a_text() -> None:
    assert set(roll.extend.__all__) <= generate_types.named()
    assert generate_types.lacking() == []


def test_every_key_of_a_run_file_has_a_description_and_every_number_a_unit() -> None:
    assert generate_config.lacking() == []


def test_every_benchmark_is_named_with_what_it_measures() -> None:
    folder = ROOT / "benchmarks"
    page = (folder / "README.md").read_text(encoding="utf-8")
    run = {p.name for p in folder.glob("*.py") if '__name__ == "__main__"' in p.read_text()}
    jobs = {name for name in run if name.endswith("_job.py")}  # which others start
    assert set(re.findall(r"benchmarks/(\w+\.py)", page)) == run - jobs


def test_commands_of_benchmarks_in_the_documentation_exist() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
    for page in [*pages, *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]:
        for name in re.findall(r"benchmarks/\w+\.py", page.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{page.name} names {name}"
