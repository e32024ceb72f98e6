"""The tool `calculator`: arithmetic on an expression, and nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from roll.envs.tools.api import ToolError

MAX_CHARS = 1000
"""Largest length of an expression, in characters."""
MAX_BITS = 4096
"""Largest size of a whole number, in bits."""

_SIGNS = str.maketrans(
    {"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "^": "**"}
)
_NAMES: dict[str, float] = {"pi": math.pi, "e": math.e, "tau": math.tau}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression, such as (3 + 4) * 2 or sqrt(2) / 7.

    Args:
        expression: numbers, + - * / // % and ** or ^, brackets, and functions such as sqrt, abs,
            round, min, max, log, exp, sin, cos, tan, floor, ceil, factorial, gcd, comb.
    """
    text = expression.translate(_SIGNS).strip()
    if len(text) > MAX_CHARS:
        raise ToolError(f"the expression has more than {MAX_CHARS} characters")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except SyntaxError:
        raise ToolError(f"{expression!r:.80} is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (OverflowError, RecursionError, MemoryError):
        raise ToolError("the expression or its value is too large") from None
    except (ValueError, TypeError) as error:
        raise ToolError(str(error)) from None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"
    return str(value)


def _value(node: ast.AST) -> int | float:
    """Return the value of a part of an expression; ToolError if it is no arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return _value(operand) if isinstance(sign, ast.UAdd) else -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _bounded(_OPERATORS[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*(_value(each) for each in given)))
    raise ToolError(f"{ast.unparse(node)!r:.80} is no part of an arithmetic expression")


def _bounded(value: Any) -> int | float:
    """Return a number unchanged; OverflowError if it is too large or not finite, ToolError if it is
    no real number."""
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    if not isinstance(value, int | float):
        raise ToolError("the value is no real number")
    return value


def _power(base: float, exponent: float) -> float:
    """Return a power; OverflowError if it is too large."""
    whole = isinstance(base, int) and isinstance(exponent, int) and base not in (-1, 0, 1)
    if whole and abs(exponent) * int(base).bit_length() > 2 * MAX_BITS:
        raise OverflowError
    result = base**exponent
    return _bounded(result)


def _divided(a: float, b: float) -> float:
    """Divide; of whole numbers, exactly where the result is whole."""
    if isinstance(a, int) and isinstance(b, int) and b and a % b == 0:
        return a // b
    return a / b


def _factorial(n: float) -> int:
    """Return n!; ToolError unless n is a whole number from 0 to 400."""
    if n != int(n) or not 0 <= n <= 400:
        raise ToolError("factorial takes a whole number from 0 to 400")
    return math.factorial(int(n))


def _comb(n: int, k: int) -> int:
    """Return the number of ways to choose k of n; ToolError unless both are whole and k <= n <=
    4000."""
    if not (isinstance(n, int) and isinstance(k, int) and 0 <= k <= n <= 4000):
        raise ToolError("comb takes whole numbers k <= n <= 4000")
    return math.comb(n, k)


def _round(value: float, digits: float = 0) -> float:
    """Round to so many digits behind the point; without them, to a whole number."""
    if not digits:
        return round(value)
    # No value has as many digits as `MAX_BITS`, so a bound there changes no result. Without it
    # Python computes 10**-digits, in which no time limit can stop it.
    return round(value, max(-MAX_BITS, min(int(digits), MAX_BITS)))


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos")},
    **{name: getattr(math, name) for name in ("tan", "asin", "acos", "atan", "floor", "ceil")},
    **{"abs": abs, "min": min, "max": max, "round": _round, "pow": _power, "gcd": math.gcd},
    **{"factorial": _factorial, "comb": _comb, "degrees": math.degrees, "radians": math.radians},
}
