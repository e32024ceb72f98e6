"""The run files of docs/how_do_i.md are accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll.config import load_config

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how_do_i.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_has_questions() -> None:
    assert len(BLOCKS) > 8


@pytest.mark.parametrize(("question", "answer"), BLOCKS, ids=[question for question, _ in BLOCKS])
def test_what_an_answer_shows_is_accepted(question: str, answer: str, tmp_path: Path) -> None:
    base = ROOT / "examples" / "rlvr_gsm8k" / "run.yaml"
    for block in re.findall(r"```yaml\n(.*?)```", answer, re.DOTALL):
        file = tmp_path / "run.yaml"
        file.write_text(f"defaults: [{base}]\n{block}")
        load_config(file)
