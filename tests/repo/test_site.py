"""The documentation builds as a site: every link and every anchor leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE = re.compile(
    r"""<(?:script|img|iframe)[^>]+src=["']?(?:https?:)?//|"""
    r"""<link[^>]+rel=["']?(?:stylesheet|pre)[^>]*href=["']?(?:https?:)?//|"""
    r"""url\(["']?(?:https?:)?//"""
)
"""Whatever a browser would fetch from elsewhere to show a page."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    found = [str(page.relative_to(site)) for page in pages if OUTSIDE.search(page.read_text())]
    assert len(pages) > 50
    assert found == []


@pytest.mark.slow
def test_links_to_folders_and_code_lead_to_pages(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="examples/agentic_frozen_lake/index.html"' in page
    assert 'href="examples/rlvr_quickstart/run.yaml.html"' in page
    assert "prompts_per_step" in (site / "examples/rlvr_quickstart/run.yaml.html").read_text()


@pytest.mark.slow
def test_every_list_table_and_block_of_code_is_shown_as_one(site: Path) -> None:
    """Markdown shows them as plain text if no empty line stands before them."""
    text = re.compile(r"<p>(?:.*\n)?\s*(?:[*-] |1\. |\| |```)", re.DOTALL)
    found = [
        f"{page.relative_to(site)}: {match[0][:60]}"
        for page in site.rglob("*.html")
        for paragraph in re.findall(r"<p>.*?</p>", page.read_text(encoding="utf-8"), re.DOTALL)
        if (match := text.match(paragraph))
    ]
    assert found == []
