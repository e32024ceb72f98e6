"""Checks of import paths `package.module:name` by reading files; nothing is imported or run."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Collection, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from roll.config.errors import ConfigError, nearest


def check_import_path(key: str, path: str, folder: Path, keywords: Collection[str] = ()) -> None:
    """Raise ConfigError for an import path that certainly cannot work; accept all others.

    Args:
        key: key of the config that holds the path, for the message.
        path: the import path, `package.module:name`.
        folder: folder of the user's modules, which is searched before all others.
        keywords: names of arguments that a function at this path must accept.

    Raises:
        ConfigError: the path has another form, the module does not exist or has a syntax error, the
            name is not in the module, or the function does not accept `keywords`.
    """
    module, _, name = path.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or not name.isidentifier():
        raise ConfigError(f"{key}: {path!r} must read 'package.module:name'")
    try:
        spec = _find(module, folder)
    except KeyError:  # below a nested namespace package, which only an import can resolve
        return
    if spec is None:
        raise ConfigError(
            f"{key}: no module named {module!r}; looked beside the YAML file ({folder}) and on "
            "PYTHONPATH"
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    names = _names_in(Path(spec.origin), key)
    if names is not None and name not in names:
        public = sorted(n for n in names if not n.startswith("_"))
        raise ConfigError(f"{key}: {spec.origin} has no {name!r}{nearest(name, public)}")
    _check_keywords(key, Path(spec.origin), name, keywords)


def _check_keywords(key: str, file: Path, name: str, keywords: Collection[str]) -> None:
    """Raise ConfigError if the function does not accept `keywords`.

    Only a plain function that is defined once and not decorated is checked; the parameters of
    others are not certain.

    Args:
        key: key of the config that holds the import path, for the message.
        file: Python file in which `name` stands.
    """
    body = ast.parse(file.read_bytes()).body
    found = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [n for n in found if n.name == name]
    if len(found) != 1 or found[0].decorator_list or found[0].args.kwarg:
        return
    arguments = found[0].args
    known = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    for keyword in keywords:
        if keyword not in known:
            raise ConfigError(
                f"{key}: {name} in {file} has no parameter {keyword!r}{nearest(keyword, known)}"
            )


def _find(module: str, folder: Path) -> ModuleSpec | None:
    """Find a module as `importlib.util.find_spec` does, but without importing its parent packages;
    None if there is none. KeyError below a nested namespace package."""
    importlib.invalidate_caches()
    parts = module.split(".")
    search: list[str] | None = None
    spec = None
    sys.path.insert(0, str(folder))
    try:
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            specs = (finder.find_spec(name, search) for finder in sys.meta_path)
            spec = next((each for each in specs if each is not None), None)
            if spec is None:
                return None
            search = list(spec.submodule_search_locations or [])
    finally:
        sys.path.remove(str(folder))
    return spec


def _names_in(file: Path, key: str) -> set[str] | None:
    """Return the names at the top level of a module; None if names can be added while it runs.

    Raises:
        ConfigError: the file is not valid Python.
    """
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}: {file} is not valid Python: {error}") from None
    names: set[str] = set()
    for node in _outside_functions(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.update(node.names)
    open_ended = {"*", "__getattr__"} & names or {"globals", "exec", "vars", "setattr"} & called
    return None if open_ended else names


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a module that are not inside a function or a class."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _outside_functions(child)
