"""`Draft`: the run file that is being made, with a comment behind each value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from roll.config.loading.written import in_one_line

ORDER = (
    "pipeline",
    "output_dir",
    "seed",
    "max_steps",
    "epochs",
    "resume",
    "cluster",
    "pools",
    "model",
    "actor_train",
    "actor_infer",
    "reference",
    "critic",
    "process_reward",
    "teachers",
    "environments",
    "data",
    "sampling",
    "rollout",
    "weight_sync",
    "judges",
    "rewards",
    "domains",
    "algorithm",
    "loss",
    "validation",
    "checkpoint",
    "track",
)
"""Order of the sections in the file."""
_FLOW_WIDTH = 100
"""Number of characters up to which a mapping or list is written in one line."""


class Draft:
    """Settings of the run file to be made, and the comments behind them."""

    def __init__(self) -> None:
        """Begin with an empty file."""
        self.tree: dict[str, Any] = {}
        self._comments: dict[str, str] = {}

    def put(self, target: str, value: Any, comment: str = "") -> None:
        """Set a dotted key; mappings around it are made."""
        *around, last = target.split(".")
        node = self.tree
        for part in around:
            node = node.setdefault(part, {})
        node[last] = value
        if comment:
            self._comments[target] = comment

    def get(self, target: str, default: Any = None) -> Any:
        """Return the value of a dotted key; `default` if it is not set."""
        node: Any = self.tree
        for part in target.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return node

    def drop(self, target: str) -> None:
        """Remove a dotted key, if it is set."""
        around, _, last = target.rpartition(".")
        node = self.get(around) if around else self.tree
        if isinstance(node, dict):
            node.pop(last, None)

    def comment(self, target: str) -> str:
        """Return the comment behind a key; empty if there is none."""
        return self._comments.get(target, "")

    def origins(self) -> set[str]:
        """Return the words of all comments in the file, among them the keys that values are made
        of."""
        told = (line.partition("  # ")[2] for line in self.text().splitlines())
        return {word for comment in told for word in re.split(r"[,:;]?\s+|:", comment)}

    def text(self) -> str:
        """Return the file as YAML, in the order of `ORDER`."""
        rank = {name: i for i, name in enumerate(ORDER)}
        top = sorted(self.tree.items(), key=lambda item: rank.get(item[0], len(rank)))
        lines: list[str] = []
        for key, value in top:
            part = list(self._lines(key, value, key, 0))
            if len(part) > 1 and lines and lines[-1]:
                lines.append("")
            lines += part
            if len(part) > 1:
                lines.append("")
        return "\n".join(lines).rstrip() + "\n"

    def _lines(self, key: str, value: Any, target: str, depth: int) -> Iterator[str]:
        """Yield the lines of one key and everything in it."""
        space, name = "  " * depth, flow(key)
        comment = self._comments.get(target)
        behind = f"  # {comment}" if comment else ""
        told_inside = any(each.startswith(f"{target}.") for each in self._comments)
        short = len(flow(value)) + len(name) + 2 * depth <= _FLOW_WIDTH
        if isinstance(value, dict) and value and (told_inside or not short):
            yield f"{space}{name}:{behind}"
            for inner, each in value.items():
                yield from self._lines(inner, each, f"{target}.{inner}", depth + 1)
        elif _holds_mappings(value) and not short:
            yield f"{space}{name}:{behind}"
            for item in value:
                yield f"{space}  - {flow(item)}"
        else:
            yield f"{space}{name}: {flow(value)}{behind}"


def flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    return in_one_line(value, quotes=isinstance(value, str) and "\n" in value)


def one_line(text: str) -> str:
    """Return a text that can stand behind `#`: in one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _holds_mappings(value: Any) -> bool:
    return isinstance(value, Sequence) and any(isinstance(item, dict) for item in value)
