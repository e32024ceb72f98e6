"""Checks of import paths `package.module:name` by reading files; nothing is imported or run."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from roll.config.errors import ConfigError, nearest

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Call:
    """Call that the framework makes of the object at an import path."""

    given: int = 0
    """Number of arguments that the framework gives first, by place."""
    keywords: Collection[str] = ()
    """Names of the arguments of the run file."""
    supplied: Collection[str] = ()
    """Names of arguments that the framework gives if there are such parameters."""
    method: str | None = None
    """Method that gets the arguments if the object is a class; None: a class is not looked at."""


def check_import_path(key: str, path: str, folder: Path, call: Call | None = None) -> None:
    """Raise ConfigError for an import path that certainly cannot work; accept all others.

    Args:
        key: key of the config that holds the path, for the message.
        path: the import path, `package.module:name`.
        folder: folder of the user's modules, which is searched before all others.
        call: how the object is called; None: its parameters are not looked at.

    Raises:
        ConfigError: the path has another form, the module does not exist or has a syntax error, the
            name is not in the module, or the function or class cannot be called like this.
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
    if call is not None:
        _check_call(key, Path(spec.origin), name, call)


def _check_call(key: str, file: Path, name: str, call: Call) -> None:
    """Raise ConfigError if a function or class cannot be called like this.

    Only what is defined once and not decorated is checked; the parameters of others are not
    certain.

    Args:
        key: key of the config that holds the import path, for the message.
        file: Python file in which `name` stands.
    """
    arguments = _parameters(ast.parse(file.read_bytes()).body, name, call.method)
    if arguments is None:
        return
    by_place = [*arguments.posonlyargs, *arguments.args]
    what = f"{key}: {name} in {file}"
    if call.given > len(by_place) and arguments.vararg is None:
        raise ConfigError(
            f"{what} takes {len(by_place)} arguments by place; roll gives it {call.given} before "
            "those of the run file"
        )
    ours = {argument.arg for argument in by_place[: call.given]} | {*call.supplied}
    known = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    known = [each for each in known if each not in ours]
    for keyword in call.keywords:
        if keyword in ours:
            raise ConfigError(f"{what} gets {keyword!r} from roll; remove it")
        if keyword not in known and arguments.kwarg is None:
            raise ConfigError(f"{what} has no parameter {keyword!r}{nearest(keyword, known)}")
    without = len(by_place) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*[None] * without, *arguments.defaults]
    defaults += arguments.kw_defaults
    for argument, default in zip([*by_place, *arguments.kwonlyargs], defaults, strict=True):
        if default is None and argument.arg not in {*call.keywords, *ours}:
            raise ConfigError(f"{what} needs {argument.arg!r}; give it a value in `kwargs`")


def _parameters(body: list[ast.stmt], name: str, method: str | None) -> ast.arguments | None:
    """Return the parameters of a function, or those of a method of a class without the first one;
    None if they are not certain."""
    defined = [n for n in body if isinstance(n, (*FUNCTIONS, ast.ClassDef))]
    found = [n for n in defined if n.name == name]
    if len(found) != 1 or found[0].decorator_list:
        return None
    [node] = found
    if not isinstance(node, ast.ClassDef):
        return node.args
    if method is None or node.keywords:  # a metaclass may call the class in another way
        return None
    empty: dict[str, list[ast.AST]] = {"__new__": [], method: []}
    named = empty | _named_in(node)
    if not node.bases and method == "__init__" and not [*named["__new__"], *named[method]]:
        return ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    if named["__new__"] or len(named[method]) != 1:
        return None
    [maker] = named[method]
    if not isinstance(maker, FUNCTIONS) or maker not in node.body or maker.decorator_list:
        return None
    by_place = maker.args.posonlyargs or maker.args.args
    del by_place[:1]  # the object itself
    return maker.args


def _named_in(node: ast.ClassDef) -> dict[str, list[ast.AST]]:
    """Return the functions in a class by name, also nested ones, and the names in it."""
    found: dict[str, list[ast.AST]] = {}
    for each in ast.walk(node):
        if isinstance(each, FUNCTIONS):
            found.setdefault(each.name, []).append(each)
        elif isinstance(each, ast.Name):
            found.setdefault(each.id, []).append(each)
    return found


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
