r"""Splitting of an answer: tuples, sets, lists, intervals, unions, inequalities, named values.

Only the outermost level is split; the elements stay text, and the caller compares them. So the same
rules apply to plain numbers and to expressions that need algebra.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_ELEMENTS = 200
_OPEN, _CLOSE = "([{", ")]}"
_RELATIONS = ("\\le", "\\ge", "<", ">", "\\ne", "=")
_MIRROR = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_OR = re.compile(r"(?<![A-Za-z])(?:or|and|\\lor|\\land|\\cup)(?![A-Za-z])")
_NAME = re.compile(r"\\?[A-Za-z]+'*(?:_\{?\w+\}?)?(?:\([A-Za-z0-9,]+\))?'*")
_MEASURED = re.compile(
    r"m?\\(?:angle|measuredangle) ?[A-Z]{1,3}|\|[A-Z]{2}\||\[[A-Z]{3,6}\]|\\overline\{[A-Z]{2}\}"
)
"""Names of measured quantities in geometry: angles, lengths, areas."""
_MEMBER = re.compile(r"(?P<name>\\?[A-Za-z]\w*)\\in(?![a-z])\s*(?P<set>.+)")
_REALS = re.compile(r"\\mathbb\{?R\}?|(?:all|every) (?:real|reals|real numbers?)")
_BUILDER = re.compile(
    r"\\\{(?P<name>[A-Za-z])(?:\\in\\mathbb\{?R\}?)?(?:\||\\mid|:)(?P<rule>.+)\\\}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Outermost level of an answer."""

    kind: str
    """Kind of the answer: `tuple` (or an open interval, which is written the same way), `interval`,
    `set`, `list`, `union` (of intervals), `empty`, `named` (a value behind `x =`), `assignment`
    (values of several names, in the order of the names), `relation`, or `one` (anything else)."""
    elements: tuple[str, ...] = ()
    """Texts of the elements; two bounds for an interval."""
    brackets: str = ""
    """Opening and closing bracket of an interval, such as "[)"; empty for other kinds."""
    parts: tuple[Shape, ...] = ()
    """Intervals of a union; empty for other kinds."""
    name: str = ""
    """Text on the left of `=`, or the unknown of an inequality or membership; empty without one."""


def read_shape(text: str) -> Shape:
    """Return the outermost level of a tidied text.

    Example: read_shape("[0,1)") is an interval with the elements "0" and "1"; read_shape("x>2") is
    a union of one interval.
    """
    if text == "\\emptyset":
        return Shape("empty")
    if _REALS.fullmatch(text):
        return Shape("union", parts=(Shape("interval", ("-\\infty", "\\infty"), "()"),))
    if builder := _BUILDER.fullmatch(text):
        inner = read_shape(builder["rule"])
        return (
            inner
            if inner.kind == "union" and inner.name == builder["name"]
            else Shape("one", (text,))
        )
    if member := _MEMBER.fullmatch(text):
        inner = read_shape(member["set"])
        if inner.kind == "tuple" and len(inner.elements) == 2:
            inner = Shape("union", parts=(Shape("interval", inner.elements, "()"),))
        if inner.kind in ("interval", "set", "union", "empty"):
            union = inner if inner.kind != "interval" else Shape("union", parts=(inner,))
            return Shape(union.kind, union.elements, parts=union.parts, name=member["name"])
    pieces = _split(text, ("\\cup",))
    if len(pieces) > 1:
        return _union([as_interval(read_shape(piece)) for piece in pieces], text)
    return _alternatives(text) or _bracketed(text) or _related(text) or Shape("one", (text,))


def _alternatives(text: str) -> Shape | None:
    r"""Split several answers: "1, 2", "1 and 2", "x<1 or x>2", "x=1 or x=2", "\pm 3"; return None
    if there is only one answer or if algebra must decide."""
    pieces = _split(text, (",", ";"), words=True)
    if len(pieces) > 1:
        if any(not piece for piece in pieces) or len(pieces) > MAX_ELEMENTS:
            return None
        shapes = [read_shape(piece) for piece in pieces]
        if all(shape.kind == "union" for shape in shapes) and len({s.name for s in shapes}) == 1:
            if re.search(r"(?<![A-Za-z])and|\\land", text) or "," in text:
                return None  # an intersection; algebra must decide
            return _union(shapes, text)
        names = [shape.name for shape in shapes if shape.kind == "named"]
        if names and len(set(names)) == 1 and shapes[0].kind == "named":
            # x=1 or x=2, and x=1,2
            values = [
                s.elements[0] if s.kind == "named" else p
                for s, p in zip(shapes, pieces, strict=True)
            ]
            return Shape("list", tuple(values), name=names[0])
        if all(shape.kind == "named" for shape in shapes) and len(set(names)) == len(names):
            by_name = sorted(shapes, key=lambda shape: shape.name)
            values = [shape.elements[0] for shape in by_name]
            return Shape("assignment", tuple(values), name=",".join(sorted(names)))
        return Shape("list", tuple(pieces))
    found = re.search(r"\\pm ?", text)
    if (
        found
        and text.count("\\pm") == 1
        and "\\mp" not in text
        and _depth(text, found.start()) == 0
    ):
        before, after = text[: found.start()], text[found.end() :]
        name, _, before = before.rpartition("=")
        return Shape(
            "list", (f"{before}+{after}" if before else after, f"{before}-{after}"), name=name
        )
    return None


def _bracketed(text: str) -> Shape | None:
    """Read a text in one pair of brackets as a set, tuple or interval, "(x)" as x; None if it is
    none of these."""
    if len(text) < 3:
        return None
    if text.startswith("\\{") and text.endswith("\\}") and _match(text, 1) == len(text) - 1:
        inner = _split(text[2:-2], (",", ";"))
        return Shape("set", tuple(inner)) if all(inner) else None
    if text[0] not in "([" or text[-1] not in ")]" or _match(text, 0) != len(text) - 1:
        return None
    inner = _split(text[1:-1], (",", ";"))
    if not all(inner):
        return None
    if len(inner) == 1:
        return read_shape(inner[0]) if text[0] == "(" else None
    brackets = text[0] + text[-1]
    if brackets == "()" or len(inner) != 2:
        return Shape("tuple", tuple(inner)) if brackets in ("()", "[]") else None
    return Shape("interval", tuple(inner), brackets)


def _related(text: str) -> Shape | None:
    """Return the shape of a named value, of an inequality in one unknown (a union of intervals) or
    of another relation; None if the text has no relation sign."""
    pieces, signs = _relation(text)
    if not signs:
        return None
    if signs == ["="]:
        unknown = len(pieces[1]) == 1 and _is_name(pieces[1])
        if unknown and not _is_name(pieces[0]) and not _letters(pieces[0]):
            pieces = pieces[::-1]  # 5=x
        return (
            Shape("named", (pieces[1],), name=pieces[0])
            if _is_name(pieces[0])
            else Shape("relation")
        )
    if len(signs) == 1:
        if _is_name(pieces[1]) and not _is_name(pieces[0]) and signs[0] in _MIRROR:
            pieces, signs = pieces[::-1], [_MIRROR[signs[0]]]
        name, bound = pieces
        if not _is_name(name) or _letters(name) & _letters(bound):
            return Shape("relation")
        low, high = ("-\\infty", bound) if signs[0] in ("<", "\\le") else (bound, "\\infty")
        if signs[0] == "\\ne":
            below = Shape("interval", ("-\\infty", bound), "()")
            return Shape(
                "union", parts=(below, Shape("interval", (bound, "\\infty"), "()")), name=name
            )
        begins = "[" if signs[0] == "\\ge" else "("
        ends = "]" if signs[0] == "\\le" else ")"
        return Shape("union", parts=(Shape("interval", (low, high), begins + ends),), name=name)
    if len(signs) == 2 and _is_name(pieces[1]) and signs[0] in _MIRROR and signs[1] in _MIRROR:
        if signs[0] in (">", "\\ge"):
            pieces, signs = pieces[::-1], [_MIRROR[sign] for sign in signs[::-1]]
        if all(sign in ("<", "\\le") for sign in signs):
            brackets = ("[" if signs[0] == "\\le" else "(") + ("]" if signs[1] == "\\le" else ")")
            part = Shape("interval", (pieces[0], pieces[2]), brackets)
            return Shape("union", parts=(part,), name=pieces[1])
    return Shape("relation")


def _relation(text: str) -> tuple[list[str], list[str]]:
    """Split a chain of relations into its sides and the signs between them."""
    pieces, signs, start, i, depth = [], [], 0, 0, 0
    while i < len(text):
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        sign = next((s for s in _RELATIONS if text.startswith(s, i)), None) if depth == 0 else None
        if sign and not (sign[0] == "\\" and text[i + len(sign) : i + len(sign) + 1].isalpha()):
            pieces.append(text[start:i].strip())
            signs.append(sign)
            i += len(sign)
            start = i
        else:
            i += 1
    return [*pieces, text[start:].strip()], signs


def _is_name(text: str) -> bool:
    """Return whether a text may name a value; constants such as e and i do not."""
    if _MEASURED.fullmatch(text):
        return True
    return _NAME.fullmatch(text) is not None and text not in ("\\infty", "\\pi", "e", "i")


def _letters(text: str) -> set[str]:
    """Return all letters outside of LaTeX commands."""
    return set(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)))


def as_interval(shape: Shape) -> Shape:
    """Return a tuple of two elements as an open interval; return any other shape unchanged."""
    if shape.kind == "tuple" and len(shape.elements) == 2:
        return Shape("interval", shape.elements, "()")
    return shape


def _union(shapes: Sequence[Shape], text: str) -> Shape:
    """Return the union of intervals and unions; of other shapes, `text` as one element."""
    parts = [part for shape in shapes for part in (shape.parts or (shape,))]
    if any(part.kind != "interval" for part in parts):
        return Shape("one", (text,))
    names = {shape.name for shape in shapes}
    return Shape("union", parts=tuple(parts), name=names.pop() if len(names) == 1 else "")


def _split(text: str, marks: tuple[str, ...], *, words: bool = False) -> list[str]:
    """Split a text at `marks` outside of all brackets.

    With `words`, split at "or" and "and", too, but not at a comma inside a number (1,234), and
    leave out empty pieces between others.
    """
    pieces, start, depth, i = [], 0, 0, 0
    while i < len(text):
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        cut = 0
        if depth == 0:
            mark = next((m for m in marks if text.startswith(m, i)), None)
            if mark and not (words and mark == "," and _in_number(text, i)):
                cut = len(mark)
            elif words and (match := _OR.match(text, i)) and match[0] != "\\cup":
                cut = match.end() - i
        if cut:
            pieces.append(text[start:i].strip())
            i += cut
            start = i
        else:
            i += 1
    last = [*pieces, text[start:].strip()]
    # "1, 2, and 3" has an empty piece before "and".
    return [p for p in last if p] if words and len(last) > 1 and last[0] and last[-1] else last


def _in_number(text: str, i: int) -> bool:
    """Return whether the comma at index `i` groups the digits of a number."""
    before = re.search(r"(?:^|[^\d.,])\d{1,3}(?:,\d{3})*$", text[:i])
    after = re.match(r",\d{3}(?!\d)", text[i:])
    return bool(before and after)


def _match(text: str, start: int) -> int:
    """Return the index of the bracket, of any kind, that closes the one at `start`, or -1."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        if depth == 0:
            return i
    return -1


def _depth(text: str, end: int) -> int:
    """Return the number of brackets that are open before index `end`."""
    return sum((c in _OPEN) - (c in _CLOSE) for c in text[:end])
