"""`roll report`: one page about a run, or about several that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from roll.core.errors import ConfigError
from roll.output_dir.whole_file import replace_file
from roll.report.page import page
from roll.report.read import read_runs


def write_report(folders: Sequence[Path], out: Path | None) -> Path:
    """Write the page of runs and return its path.

    Args:
        folders: their output_dirs.
        out: file to write. None: `report.html` in the folder, `comparison.html` in the first of
            several.

    Raises:
        DataError: a folder holds no run.
        ConfigError: the file cannot be written.
    """
    runs = read_runs(folders)
    path = out or folders[0] / ("report.html" if len(runs) == 1 else "comparison.html")
    content = page(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); name another file by --out"
        ) from None
    return path
