"""Hash of the user's code that makes rows: a function or a chat template, and what it imports."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from roll.config.user_code.import_path import load_object

NOT_THE_USERS = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")),
    Path(__file__).resolve().parents[2],
)
"""Folders of the standard library and of this package."""
INSTALLED = {"site-packages", "dist-packages"}
"""Names of folders with packages, whose code is not read."""


def users_code_hash(fn: str) -> str:
    """Return a hash of the module of a function, of all imported modules in its folder and below,
    and of those that these files import, also inside of functions. Modules of the standard library
    and installed ones are left out. ConfigError if there is no such function."""
    load_object(fn)
    name = fn.partition(":")[0]
    file = sys.modules[name].__file__
    if file is None:
        return fn
    folder, digest = Path(file).parent, hashlib.sha256()
    loaded = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    beside = {Path(each) for each in loaded if each.startswith(f"{folder}{os.sep}")}
    for each in sorted(beside | set(_files(name, [str(folder), *sys.path]))):
        if each.suffix == ".py":
            digest.update(f"{each} ".encode() + each.read_bytes())
    return digest.hexdigest()


def _files(module: str, path: Sequence[str]) -> Iterator[Path]:
    """Yield the file of a module of the user's, and those of all such modules that it imports, and
    so on. Nothing is imported for that.

    Args:
        path: folders in which modules are looked for.
    """
    waiting, seen = [module], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        spec = _spec(name, path)
        if spec is None or spec.origin is None or not _is_users(Path(spec.origin)):
            continue
        yield Path(spec.origin)
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        for found in _imports(Path(spec.origin), package):
            parts = found.split(".")
            waiting += [".".join(parts[: n + 1]) for n in range(len(parts))]


def _spec(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return where a module is; None if it is in no file."""
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None:
        return loaded if loaded.has_location else None
    parent, _, _ = name.rpartition(".")
    if parent:
        above = _spec(parent, path)
        if above is None or above.submodule_search_locations is None:
            return None
        path = list(above.submodule_search_locations)
    found = PathFinder.find_spec(name, path)
    return found if found is not None and found.has_location else None


def _is_users(file: Path) -> bool:
    """Return whether a file is Python code of the user's."""
    whole = file.resolve()
    if file.suffix != ".py" or INSTALLED.intersection(whole.parts):
        return False
    return not any(whole.is_relative_to(folder) for folder in NOT_THE_USERS)


def _imports(file: Path, package: str) -> Iterator[str]:
    """Yield the names of all modules that a file imports, and of what may be one.

    Args:
        package: package of the file, to which relative imports refer.
    """
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            own = package.split(".")
            above = own[: len(own) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
            yield base
