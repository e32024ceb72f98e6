"""Tests, made ready: which names the program should define, and notes instead of asserts."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import secrets
import sys
from dataclasses import dataclass

from roll.rewards.code.rows.cases import Suite


@dataclass(frozen=True, slots=True)
class Parsed:
    """Tests that can be run."""

    source: str
    names: tuple[str, ...]
    """Names that neither the tests nor Python define."""
    modules: tuple[str, ...]
    """Modules that they import and that are not Python's; those that are not installed stand for
    the program."""
    note: str
    """Name of the list that takes what the asserts find."""
    asserts: int
    """Number of asserts in the text, which may be passed several times or never; 0 where they are
    not the cases."""


def parsed(tests: Suite) -> Parsed:
    """Return tests that note what their asserts find.

    Raises:
        ValueError: they are no Python, or without asserts where these are the cases.
    """
    tree = _parse(tests)
    _add_helpers(tree, tests)
    note = f"judged_{secrets.token_hex(8)}"
    names, modules = sorted(_free_names(tree)), sorted(_modules(tree))
    asserts = 0
    if tests.style == "asserts":
        asserts = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
        tree = ast.fix_missing_locations(_Noted(note).visit(tree))
    return Parsed(ast.unparse(tree), tuple(names), tuple(modules), note, asserts)


def _parse(tests: Suite) -> ast.Module:
    """Return the tests, with a call of `check` if they define it and do not call it."""
    try:
        tree = ast.parse(tests.text)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"tests: no Python: {error}") from error
    has_assert = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    if tests.style == "asserts" and not has_assert:
        raise ValueError("tests: expected at least one assert, found none")
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    if tests.entry is not None and "check" in defined and "check" not in called:
        tree.body.append(ast.parse(f"check({tests.entry})").body[0])
    return tree


_ALIASES = {"np": "numpy", "pd": "pandas"}


def _add_helpers(tree: ast.Module, tests: Suite) -> None:
    """Put before the tests what they use, and what a program must not replace: functions of the
    text that it continues, and modules of Python that nobody imports."""
    helpers = {
        node.name: node
        for node in _parsed_or_none(tests.prelude)
        if isinstance(node, ast.FunctionDef) and node.name != tests.entry
    }
    while wanted := _free_names(tree) & helpers.keys():
        tree.body[:0] = [helpers[name] for name in sorted(wanted)]
    called = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    others = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called
    }
    for name in sorted(_free_names(tree) - others):
        module = _ALIASES.get(name, name)
        is_known = name in sys.stdlib_module_names or name in _ALIASES
        if is_known and importlib.util.find_spec(module) is not None:
            tree.body.insert(0, ast.Import([ast.alias(module, name if name != module else None)]))


def _parsed_or_none(text: str) -> list[ast.stmt]:
    """Return the statements of a text; none if it is no Python as it is."""
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return []


def _free_names(tree: ast.Module) -> set[str]:
    """Return the names that the tests use and neither they nor Python define."""
    loaded: set[str] = set()
    bound = {*dir(builtins), "__file__", "__name__", "run_solution"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return loaded - bound


def _modules(tree: ast.Module) -> set[str]:
    """Return the full names of imported modules that are not Python's, and of those above them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    above = {name.rsplit(".", n)[0] for name in found for n in range(name.count(".") + 1)}
    return {name for name in above if name.partition(".")[0] not in sys.stdlib_module_names}


class _Noted(ast.NodeTransformer):
    """Makes of each assert statements that note whether its condition holds, and go on."""

    def __init__(self, name: str) -> None:
        """Keep the name of the list that takes the notes."""
        self._name = name

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Return a `try` that notes True, False, or the exception as text."""
        name, error = self._name, f"{self._name}_error"
        made = ast.parse(
            f"try: {name}.append(bool(condition))\n"
            f"except Exception as {error}:\n"
            f"    {name}.append(type({error}).__name__ + ': ' + str({error})[:300])"
        ).body[0]
        for each in ast.walk(made):
            if isinstance(each, ast.Call) and ast.unparse(each) == "bool(condition)":
                each.args = [node.test]
                break
        return ast.copy_location(made, node)
