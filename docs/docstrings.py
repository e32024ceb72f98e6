"""Docstrings under the fields and values of classes, which Python does not keep."""

from __future__ import annotations

import ast
import inspect
import textwrap


def of_attributes(owner: type) -> dict[str, str]:
    """Return the text under each attribute of a class and of its bases, in one line each."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if not base.__module__.startswith(("roll", "mcore_adapter")):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if (name := _name(node)) and (text := _text(after)):
                found[name] = text
    return found


def _name(node: ast.stmt) -> str:
    """Return the name that a statement of a class body gives a value to; empty if it is another."""
    if isinstance(node, ast.AnnAssign):
        target: ast.expr = node.target
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        [target] = node.targets
    else:
        return ""
    return target.id if isinstance(target, ast.Name) else ""


def _text(node: ast.stmt | None) -> str:
    """Return the string that is a statement, in one line; empty if it is none."""
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return " ".join(text.split())
    return ""
