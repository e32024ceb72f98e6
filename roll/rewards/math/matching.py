"""Comparison of answers that are split into elements: sets, tuples, lists, intervals, named values.

Verdicts are True, False, or None for undecided. The caller then decides by algebra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from roll.rewards.math.shapes import Shape, as_interval, read_shape

T = TypeVar("T")
Same = Callable[[T, T], bool | None]
Leaf = Callable[[str, str], bool | None]
"""Function that returns whether two elements are equal, or None if undecided."""


def compare(truth: Shape, answer: Shape, leaf: Leaf) -> bool | None:
    """Return whether two shapes are equal, or None if undecided; `leaf` compares the elements.

    The order of elements counts in tuples, not in sets. A list ("1, 2") may equal a tuple or a set.
    An interval equals an inequality with the same solutions, whatever the name of the unknown.
    """
    a, b = _unwrapped(truth), _unwrapped(answer)
    if "union" in (a.kind, b.kind) or "interval" in (a.kind, b.kind):
        return _same_intervals(a, b, leaf)
    kinds = {a.kind, b.kind}
    if kinds == {"empty"}:
        return True
    if "empty" in kinds:
        return False if kinds <= {"empty", "tuple", "set", "list"} else None
    if "assignment" in kinds:
        if kinds == {"assignment"} and a.name != b.name:
            return False
        known = kinds <= {"assignment", "tuple", "list"}
        return _in_order(a.elements, b.elements, leaf) if known else False
    if kinds == {"tuple", "set"}:
        return False
    if kinds <= {"tuple", "list"} and "tuple" in kinds:
        return _in_order(a.elements, b.elements, leaf)
    if kinds <= {"set", "list"}:
        return _in_any_order(a.elements, b.elements, leaf)
    if kinds == {"named"}:
        return compare(_value(a), _value(b), leaf) if a.name == b.name else None
    if "named" in kinds:
        named, other = (a, b) if a.kind == "named" else (b, a)
        return None if other.kind == "relation" else compare(_value(named), other, leaf)
    return None if kinds != {"one"} else leaf(a.elements[0], b.elements[0])


def _value(named: Shape) -> Shape:
    """Return the shape of the value behind `x =`."""
    return read_shape(named.elements[0])


def _unwrapped(shape: Shape) -> Shape:
    """Return the element of a set or list with one element; any other shape unchanged."""
    if shape.kind in ("set", "list") and len(shape.elements) == 1:
        return read_shape(shape.elements[0])
    return shape


def _same_intervals(a: Shape, b: Shape, leaf: Leaf) -> bool | None:
    """Compare intervals or unions of them; a pair counts as an open interval. None if algebra must
    decide."""
    if a.name and b.name and a.name != b.name:
        return False
    sides = []
    for shape in (a, b):
        if shape.kind == "union":
            sides.append(shape.parts)
        elif shape.kind == "interval":
            sides.append((shape,))
        elif shape.kind == "tuple" and len(shape.elements) == 2:
            sides.append((as_interval(shape),))
        elif shape.kind in ("set", "list", "assignment", "empty"):
            return False
        else:
            return None
    left, right = sides
    if len(left) == len(right):
        found = _matched(
            left,
            right,
            lambda p, q: _and(p.brackets == q.brackets, _in_order(p.elements, q.elements, leaf)),
        )
        if found or len(left) == 1:
            return found
    return None  # unions may overlap, so algebra must decide


def _in_order(a: Sequence[str], b: Sequence[str], leaf: Leaf) -> bool | None:
    """Return whether the elements are as many, and equal in their order; None if undecided."""
    if len(a) != len(b):
        return False
    return _all(compare(read_shape(x), read_shape(y), leaf) for x, y in zip(a, b, strict=True))


def _in_any_order(a: Sequence[str], b: Sequence[str], leaf: Leaf) -> bool | None:
    """Return whether both have the same elements, each at least once; None if undecided."""

    def same(x: str, y: str) -> bool | None:
        return compare(read_shape(x), read_shape(y), leaf)

    a, b = list(dict.fromkeys(a)), list(dict.fromkeys(b))
    return _matched(a, b, same) if len(a) == len(b) else _covered(a, b, same)


def _matched(a: Sequence[T], b: Sequence[T], same: Same[T]) -> bool | None:
    """Return whether each element of `a` has an equal partner of its own in `b`; None if undecided.

    The lengths must be equal: a longer `b` also gives True. Equality is transitive, so the first
    equal element of `b` can be taken as the partner.
    """
    left, open_pairs = list(b), False
    for x in a:
        verdicts = [same(x, y) for y in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            open_pairs = True
        else:
            return False
    return None if open_pairs else True


def _covered(a: Sequence[T], b: Sequence[T], same: Same[T]) -> bool | None:
    """Return whether each element of `a` is in `b` and the reverse; None if undecided.

    This is for sets of different lengths, which may contain an element twice (1/2 and 0.5).
    """
    return _and(
        _all(_any(same(x, y) for y in b) for x in a), _all(_any(same(x, y) for x in a) for y in b)
    )


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    """Return True if a verdict is True, else None if one is undecided, else False."""
    found = list(verdicts)
    return True if True in found else (None if None in found else False)


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Return False if a verdict is False, else None if one is undecided, else True."""
    result: bool | None = True
    for verdict in verdicts:
        if verdict is False:
            return False
        result = result and verdict
    return result


def _and(a: bool | None, b: bool | None) -> bool | None:
    """Return `_all` of two verdicts."""
    return _all((a, b))
