"""Hook of mkdocs: the site has the folders of the repository, so that every link works in both.

Its pages are the documents of the repository. A link to a folder leads to its README; a link to a
file of code leads to a page that shows the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "*.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "docker/*.md",
    "benchmarks/*.md",
    "mcore_adapter/*.md",
)
AS_THEY_ARE = {".md", ".png", ".svg"}
"""Endings of files that are not shown as code."""
LANGUAGES = {".py": "python", ".yaml": "yaml"}
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^()#\s]+)")
"""Target of a link inside the repository, without its anchor."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the site: those of the theme, documents, and what documents link to."""
    found = [file for file in files if file.src_dir != config.docs_dir]
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    names = {path.relative_to(ROOT).as_posix() for path in pages}
    names |= {target for name in names for target in _targets(name)}
    for name in sorted(names):
        if PurePosixPath(name).suffix in AS_THEY_ARE:
            found.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
        else:
            found.append(File.generated(config, f"{name}.md", content=_code_page(name)))
    return Files(found)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links to the pages of folders and of code."""
    folder = PurePosixPath(page.file.src_uri).parent

    def of_the_site(link: re.Match[str]) -> str:
        name = _inside(folder, link[1])
        if name is not None and (ROOT / name).is_dir():
            return f"{link[1].rstrip('/')}/README.md"
        if name is not None and PurePosixPath(name).suffix not in AS_THEY_ARE:
            return f"{link[1]}.md"
        return link[1]

    return LINK.sub(of_the_site, _with_wide_lists(markdown))


def _with_wide_lists(markdown: str) -> str:
    """Return the page with what belongs to an entry of a list four spaces in, as Python-Markdown
    wants it; the repository's documents have two or three there, as other readers do."""
    lines, fence = [], None
    for line in markdown.splitlines():
        depth = len(line) - len(line.lstrip(" "))
        opens = line.lstrip(" ").startswith("```")
        if fence is None:
            shift = 4 - depth if depth in (2, 3) else 0
            fence = shift if opens else None
        else:
            shift = fence
            fence = None if opens else fence
        lines.append(" " * shift + line if line.strip() else line)
    return "\n".join(lines) + "\n"


def _targets(page: str) -> Iterator[str]:
    """Yield the files of the repository that a document links to."""
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        name = _inside(PurePosixPath(page).parent, link)
        if name is not None and (ROOT / name).is_file():
            yield name


def _inside(folder: PurePosixPath, link: str) -> str | None:
    """Return the path in the repository that a link leads to; None if there is nothing."""
    name = normpath(folder / link)
    return name if (ROOT / name).exists() else None


def _code_page(name: str) -> str:
    """Return a page that shows a file of code."""
    code = (ROOT / name).read_text(encoding="utf-8").rstrip()
    language = LANGUAGES.get(PurePosixPath(name).suffix, "text")
    return f"# {PurePosixPath(name).name}\n\n`{name}`\n\n````{language}\n{code}\n````\n"
