"""The generated pages are what the code says today."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_algorithms_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    found = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert found == made["text"](), "run: python docs/generate.py"
