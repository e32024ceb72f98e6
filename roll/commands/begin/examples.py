"""`roll examples`: the examples, and copies of them with all that they need.

They lie in the wheel as `roll/examples`, and in the repository beside `roll`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import roll
from roll.config.errors import UserError, nearest
from roll.config.loading.compose import compose

_FOR_SCRIPTS = "warm_start.yaml"
"""Name of the run files that the examples' scripts start."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Result of a copy: what is new, and how to go on."""

    files: list[Path]
    """Files that were not there before."""
    commands: list[str]
    """Commands that make models and data, and those that run the example, in this order."""


def list_examples() -> Mapping[str, str]:
    """Return the name of each example, and how the comment in its run file begins; the title of its
    page if no run file is the main one."""
    found = {}
    for page in sorted(_root().glob("*/README.md")):
        folder = page.parent
        main = folder / "run.yaml"
        if not main.is_file():
            found[folder.name] = page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            continue
        text = main.read_text(encoding="utf-8")
        comment = " ".join(re.findall(r"^# (.+)$", text.partition("\npipeline:")[0], re.MULTILINE))
        found[folder.name] = re.split(r"[.:;](?: |$)", comment)[0]
    return found


def copy_example(name: str, folder: Path) -> Copied:
    """Copy an example, and the scripts and other examples that it needs, to `folder/examples`.

    Raises:
        UserError: there is no such example, or a file with another content is in the way; nothing
            is copied then.
    """
    root, known = _root(), list_examples()
    if name not in known:
        raise UserError(
            f"there is no example {name!r}{nearest(name, known)}; `roll examples list` lists all"
        )
    wanted = {
        folder / "examples" / path.relative_to(root): path.read_bytes()
        for member in sorted(_needed(root, name))
        for path in _files(root / member)
    }
    there = [path for path in wanted if path.exists() or path.is_symlink()]
    other = [str(path) for path in there if not _holds(path, wanted[path])]
    if other:
        raise UserError(
            f"{', '.join(other)}: there already, with another content; nothing was copied. Name "
            f"another folder: roll examples copy {name} FOLDER"
        )
    new = [path for path in wanted if path not in there]
    for path in new:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:  # refuses what has appeared meanwhile
            file.write(wanted[path])
    return Copied(new, [*_commands(root / name)])


def _root() -> Path:
    """Return the folder of all examples.

    Raises:
        UserError: it is missing.
    """
    package = Path(roll.__file__).parent
    places = package / "examples", package.parent / "examples"
    for place in places:
        if (place / "README.md").is_file():
            return place
    raise UserError(
        f"the examples are neither in {places[0]} nor in {places[1]}; install roll anew"
    )


def _run_files(folder: Path) -> list[Path]:
    """Return the run files of an example that a user starts, `run.yaml` first."""
    files = [path for path in folder.glob("*.yaml") if path.name != _FOR_SCRIPTS]
    return sorted(files, key=lambda path: (path.name != "run.yaml", path.name))


def _files(member: Path) -> Iterator[Path]:
    """Yield the files of an example, or the script itself; no compiled modules."""
    paths = sorted(member.rglob("*")) if member.is_dir() else [member]
    yield from (path for path in paths if path.is_file() and path.suffix != ".pyc")


def _needed(root: Path, name: str) -> set[str]:
    """Return the folders and scripts that an example needs, itself among them: those that its files
    name, and those that these name."""
    folders = {path.parent.name for path in root.glob("*/README.md")}
    scripts = {path.stem: path.name for path in root.glob("*.py")}
    needed, new = {name}, [name]
    while new:
        for path in _files(root / new.pop()):
            text = path.read_text(encoding="utf-8")
            named = {
                scripts[word]
                for word in re.findall(r"\bexamples[./](\w+)", text)
                if word in scripts
            }
            if path.suffix in (".py", ".yaml"):
                named |= folders.intersection(re.findall(r"\w+", text))
            new += named - needed
            needed |= named
    return needed


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def _commands(folder: Path) -> Iterator[str]:
    """Yield the commands of an example; those that make something come first, each once."""
    files = _run_files(folder)
    made_by = (text for file in files for text in _values(compose(file, [])[0], "made_by"))
    yield from dict.fromkeys(text for text in made_by if text.startswith("python "))
    yield from (f"roll run examples/{folder.name}/{file.name}" for file in files)


def _values(tree: Any, key: str) -> Iterator[str]:
    """Yield all values of a key, at any depth."""
    if isinstance(tree, Mapping):
        if key in tree:
            yield tree[key]
        for value in tree.values():
            yield from _values(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from _values(value, key)
