"""A Python of another environment, which starts as this one does but finds other packages."""

from __future__ import annotations

import venv
from pathlib import Path


def make_python(folder: Path, *packages: Path) -> str:
    """Make an environment whose packages lie in the given folders; return its Python's path."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in packages))
    return str(folder / "bin" / "python")
