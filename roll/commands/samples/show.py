"""Samples as lines that a person can read, and that no response can turn into something else."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

SHORT = 800
"""Number of characters of a text that are shown without `--full`."""
_MARGIN = 20
"""Columns before the texts."""
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of characters that move the cursor, turn texts around, or are not seen."""
_JOINERS = frozenset("\u200c\u200d")
"""Characters inside of words and emoji of many scripts, without another effect."""


def printable(text: str) -> str:
    """Return a text with escapes in place of all characters that a terminal obeys or does not show,
    except line ends.

    Example: printable("\\x1b[2J") gives a backslash, `x1b[2J`.
    """
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if _escaped(char) else char for char in text
    )


def _escaped(char: str) -> bool:
    return (
        char != "\n"
        and char not in _JOINERS
        and not char.isprintable()
        and unicodedata.category(char) in _INVISIBLE
    )


def lines_of(row: Mapping[str, Any], *, full: bool) -> Iterator[tuple[str, bool]]:
    """Return an iterator over the lines of a sample, each with whether it is a heading.

    Args:
        row: columns of `sample_files.schema`.
        full: whether long texts are shown whole.
    """
    yield _heading(row), True
    for name in ("rewards", "parts"):
        if row[name]:
            numbers = "  ".join(f"{key} {value:.4g}" for key, value in row[name])
            yield from _block(name, numbers, full=True)
    if row["failed_rewards"]:
        yield from _block("failed", ", ".join(row["failed_rewards"]), full=True)
    yield from _block("prompt", row["prompt"], full=full)
    for turn in row["turns"] or ():
        reward = turn["reward"]
        name = turn["by"] if reward is None else f"{turn['by']} {reward:.3g}"
        yield from _block(name, turn["text"], full=full)
    if not row["turns"]:
        yield from _block("response", row["response"], full=full)
    yield from _block("truth", row["ground_truth"], full=full)
    yield "", False


def _heading(row: Mapping[str, Any]) -> str:
    """Return the line above a sample."""
    reward = "none" if row["reward"] is None else f"{row['reward']:.4g}"
    place = f"step {row['step']}"
    if row["split"] == "validation":
        place = f"validation {row['set']} after step {row['step']}"
    parts = (
        place,
        f"reward {reward}",
        f"tag {row['tag']}",
        f"{row['response_tokens']} tokens",
        str(row["finish_reason"]),
        str(row["id"]),
    )
    return _one_line("  ".join(parts))


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def _block(name: str, text: str | None, *, full: bool) -> Iterator[tuple[str, bool]]:
    """Return an iterator over the lines of a text. A margin shows to whom each line belongs, so no
    text can look like a heading."""
    if text is None:
        return
    if not full and len(text) > SHORT:
        half = SHORT // 2
        cut = f"\n[{len(text) - 2 * half} characters are left out; --full shows them]\n"
        text = text[:half] + cut + text[-half:]
    for number, line in enumerate(printable(text).split("\n")):
        label = _one_line(name) if number == 0 else ""
        yield f"  {label:<{_MARGIN - 2}}| {line}", False
