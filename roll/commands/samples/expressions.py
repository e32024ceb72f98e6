"""Expressions over the columns of samples, such as `reward < 0 and tag == 'math'`.

They are written in a small part of Python's grammar, and become expressions of Arrow. Nothing is
evaluated by Python.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from roll.config.errors import nearest
from roll.core.errors import DataError

Kind = Literal["number", "text", "truth", "none"]
LONGEST = 2000
"""Largest number of characters of an expression."""
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
_COUNT: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}
_GRAMMAR = "comparisons, and, or, not, in, is None, + - * /, names['key'], numbers and 'texts'"


@dataclass(frozen=True, slots=True)
class Term:
    """A part of an expression."""

    value: Any
    """Expression of Arrow."""
    kind: Kind
    constant: Any = None
    """Value of a constant."""


def condition(text: str, schema: Any, option: str) -> Any:
    """Return an expression of Arrow that is true for the rows to keep.

    Args:
        text: the condition.
        schema: columns that it may name.
        option: name of the option it comes from, for messages.

    Raises:
        DataError: the text is no condition, names a column that does not exist, or compares a text
            with a number.
    """
    reader = _Reader(schema, option, text)
    if reader.term.kind != "truth":
        raise reader.error(f"is a {reader.term.kind}, not a condition such as 'reward < 0'")
    return reader.checked()


def sort_key(text: str, schema: Any, option: str) -> Any:
    """Return an expression of Arrow whose value sorts rows; the arguments and errors are those of
    `condition`, but it may be a text or a number."""
    return _Reader(schema, option, text).checked()


def entries(text: str) -> list[tuple[str, str]]:
    """Return column and key of each entry, such as `parts['NAME/PART']`, of a readable expression,
    without repetitions."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                found.append((name, key))
    return list(dict.fromkeys(found))


class _Reader:
    """Reads one expression; see `condition`."""

    def __init__(self, schema: Any, option: str, text: str) -> None:
        self._schema = schema
        self._option = option
        self._text = text
        self.term = self._read()

    def _read(self) -> Term:
        if len(self._text) > LONGEST:
            raise self.error(f"has more than {LONGEST} characters")
        try:
            return self._term(ast.parse(self._text.strip(), mode="eval").body)
        except DataError:
            raise
        except SyntaxError as error:
            raise self.error(f"cannot be read ({error.msg})") from None
        except (ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise self.error(f"cannot be read ({type(error).__name__})") from None

    def checked(self) -> Any:
        """Return the expression, which Arrow has tried on no rows; DataError if it cannot compute
        it."""
        nothing = ds.dataset(self._schema.empty_table())
        try:
            nothing.to_table(columns={"value": self.term.value})
        except pa.ArrowException as error:
            told = str(error).splitlines()[0]
            raise self.error(f"cannot be computed ({told})") from None
        return self.term.value

    def error(self, what: str) -> DataError:
        """Return an error about the whole expression."""
        shown = self._text if len(self._text) <= 200 else f"{self._text[:200]}..."
        return DataError(f"{self._option}: {shown!r} {what}; it may have {_GRAMMAR}")

    def _term(self, node: ast.expr) -> Term:
        match node:
            case ast.Constant(value=value):
                return self._constant(value)
            case ast.Name(id=name):
                return self._column(name)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                return self._entry(name, key)
            case ast.BoolOp(op=op, values=values):
                terms = [self._of(value, "truth").value for value in values]
                joined = terms[0]
                for term in terms[1:]:
                    joined = joined & term if isinstance(op, ast.And) else joined | term
                return Term(joined, "truth")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Term(~self._of(operand, "truth").value, "truth")
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._of(operand, "number")
                if inner.constant is not None:
                    return self._constant(-inner.constant)
                return Term(pc.negate(inner.value), "number")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _COUNT:
                first, second = (self._of(side, "number").value for side in (left, right))
                wide = pa.float64()
                return Term(_COUNT[type(op)](first.cast(wide), second.cast(wide)), "number")
            case ast.Compare(left=left, ops=ops, comparators=rights):
                return self._compared(left, ops, rights)
        raise self.error(f"has {ast.unparse(node)!r}, which is not understood")

    def _of(self, node: ast.expr, kind: Kind) -> Term:
        """Return a part that must be of a kind."""
        term = self._term(node)
        if term.kind != kind:
            raise self.error(f"has {ast.unparse(node)!r} where a {kind} belongs")
        return term

    def _constant(self, value: Any) -> Term:
        match value:
            case bool():
                return Term(pc.scalar(value), "truth", value)
            case int() | float():
                whole = isinstance(value, int) and abs(value) < 2**63
                return Term(pc.scalar(value if whole else float(value)), "number", value)
            case str():
                return Term(pc.scalar(value.encode("utf-8", "replace").decode()), "text", value)
            case None:
                return Term(pc.scalar(None), "none")
        raise self.error(f"has {value!r}, which is neither a number nor a text")

    def _column(self, name: str) -> Term:
        """Return a column of a number, a text or a truth."""
        kind = None if name not in self._schema.names else _kind(self._schema.field(name).type)
        if kind is None:
            raise self._unknown(name)
        return Term(pc.field(name), kind)

    def _entry(self, name: str, key: str) -> Term:
        """Return the entry of a column of named numbers; null in rows that do not have it."""
        if name not in self._schema.names or not pa.types.is_map(self._schema.field(name).type):
            raise self._unknown(f"{name}[{key!r}]")
        return Term(pc.map_lookup(pc.field(name), pa.scalar(key), "first"), "number")

    def _unknown(self, name: str) -> DataError:
        """Return the error for a column that does not exist, or that holds lists."""
        plain = [field.name for field in self._schema if _kind(field.type) is not None]
        maps = [f.name for f in self._schema if pa.types.is_map(f.type)]
        if name in maps:
            return DataError(f"{self._option}: {name} holds several numbers; write {name}['key']")
        if name in self._schema.names:
            what = "holds lists, which are not compared"
        else:
            what = f"is no column{nearest(name, plain)}"
        named = [*plain, *(f"{each}['key']" for each in maps)]
        return DataError(f"{self._option}: {name} {what} (columns: {', '.join(named)})")

    def _compared(self, left: ast.expr, ops: list[ast.cmpop], rights: list[ast.expr]) -> Term:
        """Return a comparison, or several in a row such as `0 < reward < 1`."""
        found = None
        for op, right in zip(ops, rights, strict=True):
            one = self._pair(left, op, right)
            found = one if found is None else found & one
            left = right
        return Term(found, "truth")

    def _pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        """Return the comparison of two parts."""
        if isinstance(op, ast.In | ast.NotIn):
            inside = self._inside(left, right)
            return inside if isinstance(op, ast.In) else ~inside
        first, second = self._term(left), self._term(right)
        if second.kind == "none" and isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
            missing = pc.is_null(first.value)
            return missing if isinstance(op, ast.Is | ast.Eq) else ~missing
        if type(op) not in _COMPARE:
            raise self.error("has `is` before something other than None")
        if first.kind != second.kind:
            raise self.error(
                f"compares {ast.unparse(left)!r}, a {first.kind}, with {ast.unparse(right)!r}, a "
                f"{second.kind}"
            )
        return _COMPARE[type(op)](first.value, second.value)

    def _inside(self, left: ast.expr, right: ast.expr) -> Any:
        """Return whether a text has another one in it, or a value is one of several."""
        if isinstance(right, ast.List | ast.Tuple | ast.Set):
            return self._one_of(self._term(left), [self._term(each) for each in right.elts])
        piece, whole = self._of(left, "text"), self._of(right, "text")
        if piece.constant is None:
            raise self.error("has something other than a 'text' before `in`")
        return pc.match_substring(whole.value, piece.constant)

    def _one_of(self, value: Term, choices: list[Term]) -> Any:
        if any(one.kind != value.kind or one.constant is None for one in choices):
            raise self.error(f"has choices behind `in` that are not constants of a {value.kind}")
        found = pc.scalar(False)
        for one in choices:
            found = found | (value.value == one.value)
        return found


def _kind(kind: Any) -> Kind | None:
    """Return what a column of this type holds; None for lists and maps."""
    if pa.types.is_boolean(kind):
        return "truth"
    if pa.types.is_string(kind):
        return "text"
    return "number" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else None
