"""`Keys`: the settings of another framework's file, each of which must be answered for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll.migrate.interpolation import Path, Unresolved
from roll.migrate.read import SourceFile

_ABSENT = object()


def leaves(node: Any, at: Path = ()) -> Iterator[Path]:
    """Yield the key of every value below `node` that is no mapping; empty mappings count as
    values."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, (*at, str(key)))
    elif at:
        yield at


class Keys:
    """Settings by dotted key, read with their types; and the answer to each of them.

    Reading answers for nothing: a key is answered for when a value was made of it, or when it was
    said why not. A value of a wrong type, or whose `${...}` has no value, is answered for by this
    reason and then reads as if it were left out.
    """

    def __init__(self, source: SourceFile) -> None:
        """Begin with no key answered for."""
        self.source = source
        self.used: set[Path] = set()
        """Keys from which a value was made."""
        self.reasons: dict[Path, str] = {}
        """Keys that were not translated, with the reason."""
        self._refused: set[str] = set()

    def raw(self, key: str) -> Any:
        """Return the value of a key as it stands; None if there is none."""
        found = self._find(key)
        return None if found is _ABSENT else found

    def has(self, key: str) -> bool:
        """Return whether the key has a value other than null."""
        return self._find(key) not in (_ABSENT, None)

    def names(self, key: str) -> list[str]:
        """Return the names in the mapping at a key; none if there is no mapping."""
        found = self.raw(key)
        return [str(name) for name in found] if isinstance(found, dict) else []

    def number(self, key: str) -> float | int | None:
        """Return a number, also one that is written as text; None if there is none."""
        value = self.raw(key)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                self._unread(key, value, "a number")
                return None
        if isinstance(value, bool) or (value is not None and not isinstance(value, int | float)):
            self._unread(key, value, "a number")
            return None
        if value is not None and not abs(value) < float("inf"):
            self._unread(key, value, "a finite number")
            return None
        return value

    def whole(self, key: str) -> int | None:
        """Return a whole number; None if there is none."""
        value = self.number(key)
        if value is not None and value % 1:
            self._unread(key, value, "a whole number")
            return None
        return None if value is None else int(value)

    def flag(self, key: str) -> bool | None:
        """Return true or false; None if the key is left out."""
        value = self.raw(key)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if value is not None and not isinstance(value, bool):
            self._unread(key, value, "true or false")
            return None
        return value

    def text(self, key: str) -> str | None:
        """Return a text; None if there is none."""
        value = self.raw(key)
        if isinstance(value, dict | list | Unresolved):
            self._unread(key, value, "a text")
            return None
        return None if value is None else str(value)

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, also where there is only one; empty if there is none."""
        value = self.raw(key)
        if value is None:
            return []
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list | Unresolved) for item in items):
            self._unread(key, value, "a list of texts")
            return []
        return [str(item) for item in items]

    def wholes(self, key: str) -> list[int]:
        """Return a list of whole numbers from 0 on; empty if there is none."""
        value = self.raw(key)
        if value is None:
            return []
        whole = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
        if not whole:
            self._unread(key, value, "a list of whole numbers")
            return []
        return list(value)

    def use(self, key: str) -> None:
        """Note that a value was made of this key, and of everything below it."""
        for leaf in self.at(key):
            if ".".join(leaf) not in self._refused:
                self.used.add(leaf)
                self.reasons.pop(leaf, None)

    def explain(self, key: str, why: str) -> None:
        """Note why this key, with everything below it that no value was made of, has no
        counterpart; the first reason for a key counts."""
        for leaf in self.at(key):
            if leaf not in self.used:
                self.reasons.setdefault(leaf, why)

    def refuse(self, key: str, why: str) -> None:
        """Note that the value of a key cannot be read, so that nothing can be made of it."""
        self.explain(key, why)
        self._refused.add(key)

    def can_use(self, key: str) -> bool:
        """Return whether the key has a value that could be read."""
        return self.has(key) and key not in self._refused

    def unanswered(self) -> list[Path]:
        """Return the keys of which nothing was made or said, in the order of the file."""
        every = leaves(self.source.tree)
        return [leaf for leaf in every if leaf not in self.used and leaf not in self.reasons]

    def _find(self, key: str) -> Any:
        node: Any = self.source.tree
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return _ABSENT
            node = node[part]
        return node

    def at(self, key: str) -> Iterator[Path]:
        """Yield every key at or below a key that has no further keys in it."""
        found = self._find(key)
        if found is not _ABSENT:
            yield from leaves(found, tuple(key.split(".")))

    def _unread(self, key: str, value: Any, expected: str) -> None:
        """Refuse a value that is not what is expected."""
        if isinstance(value, Unresolved):
            self.refuse(key, f"{value.text} has no value here: {value.why}")
        else:
            self.refuse(key, f"expected {expected}, found {value!r:.60}")
