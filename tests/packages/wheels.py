"""Wheels of both packages, and an environment that has them and nothing of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FOLDERS = ("roll", "examples", "requirements", "mcore_adapter")
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
BUILT = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")


def build_wheels(folder: Path) -> list[Path]:
    """Build both wheels as `make wheels` does, by way of source archives, but from a copy of the
    sources, so that nothing left by earlier builds gets in. Returns roll's wheel and
    mcore_adapter's."""
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, sources / name, ignore=BUILT)
    for name in FILES:
        shutil.copy(ROOT / name, sources)
    for project in (sources, sources / "mcore_adapter"):
        command = [str(BIN / "uv"), "build", "--offline", "--no-build-isolation", "--quiet"]
        command += ["--python", sys.executable, "--out-dir", str(folder / "dist"), str(project)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
    found = [next((folder / "dist").glob(f"{name}-*.whl")) for name in ("roll", "mcore_adapter")]
    return found


@dataclass(frozen=True)
class Installed:
    """Environment with the wheels, and a folder to work in."""

    folder: Path
    work: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path, wheels: list[Path]) -> Installed:
        """Make an interpreter's environment in `folder`, and install the wheels there.

        It also sees the packages of this interpreter, but through a line of a .pth file, so that
        the .pth files among them, which name the repository, are not read.
        """
        venv.create(folder / "env", symlinks=True)
        python = folder / "env" / "bin" / "python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = folder / "env" / "lib" / version / "site-packages"
        shared = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
        (own / "shared.pth").write_text("".join(f"{path}\n" for path in sorted(shared)))
        command = [str(BIN / "uv"), "pip", "install", "--offline", "--no-deps", "--quiet"]
        command += ["--python", str(python), *map(str, wheels)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environ |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "COLUMNS": "200"}
        (folder / "work").mkdir()
        return cls(folder / "env", folder / "work", environ)

    def run(self, *command: str, code: int = 0, timeout_s: float = 240) -> str:
        """Run a command of the environment in the folder; return what it printed."""
        done = subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]],
            cwd=self.work,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == code, f"{' '.join(command)}\n{done.stdout[-4000:]}"
        return done.stdout
