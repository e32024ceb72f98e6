"""The Python that SGLang runs in: the one of the run, or another environment's (`python`).

On GPUs SGLang pins another version of PyTorch than the rest of a run. The modules of this framework
that its process imports need few packages, so it can live in an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

import roll
from roll.core.errors import EngineMissingError
from roll.strategy.available import REQUIREMENTS, check_engine
from roll.strategy.serving import engine_args

NEEDED = {
    "sglang": "sglang",
    "torch": "torch",
    "transformers": "transformers",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "yaml": "PyYAML",
    "omegaconf": "omegaconf",
}
"""Module that SGLang's process imports -> its package on the package index."""
LIMIT_S = 60.0
"""Time limit for another Python to say what it has, in seconds."""
_QUESTION = """
import importlib.metadata, importlib.util, json, sys
found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(json.dumps({
    "python": sys.version_info[:2],
    "missing": [name for name, spec in found.items() if spec is None],
    "version": found["sglang"] and importlib.metadata.version("sglang"),
    "file": found["sglang"] and found["sglang"].origin,
}))
"""


def command(python: str | None) -> str:
    """Return the interpreter's path."""
    return sys.executable if python is None else str(Path(python).expanduser())


def check_sglang(python: str | None) -> None:
    """Raise an error unless a supported SGLang can run in a Python.

    Args:
        python: `strategy.python`; None: the Python of the run.

    Raises:
        EngineMissingError: there is no such Python, or packages are missing there, or their version
            is not supported. The message names the command that installs them.
    """
    if python is None:
        check_engine("sglang")
        return
    found, supported = _ask(python), REQUIREMENTS["sglang"].supported
    wanted = f"sglang=={min(each.version for each in supported)}"
    install = f"uv pip install --python {command(python)} '{wanted}' omegaconf"
    if tuple(found["python"]) < (3, 11):
        version = ".".join(map(str, found["python"]))
        raise EngineMissingError(
            f"strategy.python: {python} is Python {version}; take 3.11 or later"
        )
    if found["missing"]:
        missing = ", ".join(NEEDED[name] for name in found["missing"])
        raise EngineMissingError(f"strategy.python: {python} lacks {missing}: {install}")
    if Version(Version(found["version"]).public) not in supported:
        raise EngineMissingError(
            f"strategy.python: sglang {found['version']} of {python} is outside {supported}: "
            f"{install}"
        )


def package_folder(python: str | None) -> Path:
    """Return the folder of SGLang's package; EngineMissingError if it is not installed."""
    if python is not None:
        check_sglang(python)
        return Path(_ask(python)["file"]).parent
    return engine_args.package_folder("sglang")


def code_path(folder: Path, have: str) -> str:
    """Return the PYTHONPATH with which another Python finds this framework, but nothing else of
    this environment.

    Args:
        folder: existing folder for a link to the package.
        have: PYTHONPATH of this process.
    """
    code = folder / "code"
    code.mkdir(exist_ok=True)
    (code / "roll").symlink_to(Path(roll.__file__).parent)
    return os.pathsep.join(filter(None, (str(code), have)))


@cache
def _ask(python: str) -> dict[str, Any]:
    """Return what another Python has, which takes it a moment; EngineMissingError if there is no
    such Python."""
    asked = [command(python), "-c", _QUESTION, *NEEDED]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        told = getattr(error, "stderr", None) or str(error)
        raise EngineMissingError(
            f"strategy.python: {python} does not run as a Python: {told.strip()[-500:]}; name the "
            "interpreter of an environment that has SGLang, such as /envs/sglang/bin/python"
        ) from None
    return answer
