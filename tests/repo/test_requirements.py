"""The packages for GPUs fit together: a resolved list that knows every version that is pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"


def asked(name: str) -> list[Requirement]:
    """All packages that a file of requirements names, with those of the files that it includes."""
    found = []
    for line in (FOLDER / name).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            found += asked(text.removeprefix("-r "))
        elif text:
            found.append(Requirement(text))
    return found


def resolved() -> dict[str, str]:
    """Name of each package of the resolved list -> its version."""
    lines = (FOLDER / "cuda.lock").read_text().splitlines()
    pins = [line.partition(";")[0].split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version.strip() for name, version in pins}


def test_the_resolved_packages_for_gpus_are_those_that_the_requirements_ask_for() -> None:
    """If this is red after a change of requirements, make the list anew; its head says how."""
    project = tomllib.loads((ROOT / "mcore_adapter" / "pyproject.toml").read_text())["project"]
    wanted = [*asked("cuda.txt"), *asked("dev.txt"), *map(Requirement, project["dependencies"])]
    versions = resolved()
    wrong = [
        f"{need}: resolved {versions.get(canonicalize_name(need.name))}"
        for need in wanted
        if (need.marker is None or need.marker.evaluate())
        and not need.specifier.contains(versions.get(canonicalize_name(need.name), "0"), True)
    ]
    assert wrong == []


def test_the_build_of_pytorch_is_that_of_the_resolved_cuda_packages() -> None:
    build = re.search(r"^CUDA_BUILD \?= cu(\d+)0$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert build is not None
    assert resolved()["nvidia-cuda-runtime"].startswith(f"{build[1]}.")
