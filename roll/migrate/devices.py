"""Device lists of ROLL: expressions such as `list(range(0, 8)) + [9]`, which are never executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

MOST = 65536
"""Largest number of devices that an expression may name."""
_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def devices_of(value: Any) -> tuple[int, ...]:
    """Return the device numbers of a `device_mapping`: a list, a number, or an expression of
    lists, `range`, `list`, `+` and whole numbers; `list(range(0, 3)) + [6]` -> (0, 1, 2, 6).

    Raises:
        ValueError: the value is something else, names a device twice or none, or a negative one.
    """
    if isinstance(value, str):
        try:
            tree = ast.parse(value.strip(), mode="eval")
            value = _list_of(tree.body, {})
        except (SyntaxError, RecursionError, ZeroDivisionError, MemoryError):
            raise ValueError(f"{value!r} is no list of devices") from None
    found = [value] if _is_whole(value) else value
    if not isinstance(found, list) or not found or not all(map(_is_whole, found)):
        raise ValueError(f"{value!r} is no list of devices, such as `list(range(0, 8))`")
    if min(found) < 0 or len(set(found)) < len(found):
        raise ValueError(f"{value!r} names a device twice, or a negative one")
    return tuple(found)


def as_text(devices: tuple[int, ...]) -> str:
    """Return device numbers as a pool has them: (0, 1, 2, 6) -> `0-2,6`."""
    parts: list[list[int]] = []
    for device in devices:
        if parts and device == parts[-1][-1] + 1:
            parts[-1].append(device)
        else:
            parts.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(node: ast.expr, names: Mapping[str, int]) -> list[int]:
    """Return the list that an expression means; ValueError if it means none.

    Args:
        names: values of the names that may stand in it.
    """
    if isinstance(node, ast.List | ast.Tuple):
        return [_whole_of(item, names) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list_of(node.left, names) + _list_of(node.right, names)
    if isinstance(node, ast.ListComp) and len(node.generators) == 1:
        loop = node.generators[0]
        if isinstance(loop.target, ast.Name) and not loop.ifs:
            items = _list_of(loop.iter, names)
            return [_whole_of(node.elt, {**names, loop.target.id: item}) for item in items]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in ("list", "sorted", "tuple") and len(node.args) == 1:
            found = _list_of(node.args[0], names)
            return sorted(found) if node.func.id == "sorted" else found
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            numbers = range(*(_whole_of(each, names) for each in node.args))
            if len(numbers) > MOST:
                raise ValueError(f"{ast.unparse(node)} has more than {MOST} devices")
            return list(numbers)
    raise ValueError(f"`{ast.unparse(node)}` is no list of devices, such as `list(range(0, 8))`")


def _whole_of(node: ast.expr, names: Mapping[str, int]) -> int:
    """Return the whole number that an expression means; ValueError if it means none."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST:
        return value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _whole_of(node.left, names), _whole_of(node.right, names)
        return _ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole_of(node.operand, names)
    raise ValueError(f"`{ast.unparse(node)}` is no whole number")
