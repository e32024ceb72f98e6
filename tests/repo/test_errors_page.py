"""Every message on docs/errors.md is one that the code has; those of run files are provoked."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from roll.config import load_config
from roll.config.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
"""Quoted messages; `...` stands for what differs. One of another program has a remark behind it."""
GAP = "\0"
"""Place of a value in a message of the code."""
REFUSED = {
    "max_step=3": "unknown key",
    "max_steps 3": "must read key.sub=value",
    "algorithm.advantage.kind=nowhere:My": (
        "no module named ...; is its folder on PYTHONPATH or beside the YAML file?"
    ),
    "algorithm.advantage.kind=pathlib:Path": "is no class that derives from ...",
    "actor_train.strategy={kind: megatron, tp: 2}": "does not divide the ... devices of pool ...",
    "data.samples_per_prompt=1": "compares the samples of one prompt and needs at least 2",
    "critic={pool: all, optimizer: {lr: 1e-5}}": "nothing uses its values",
}
"""Setting of the quickstart -> the message that refuses it."""


def pattern(message: str) -> re.Pattern[str]:
    """The form of a quoted message."""
    return re.compile(".*".join(map(re.escape, message.split("..."))), re.DOTALL)


@cache
def texts() -> tuple[str, ...]:
    """All texts of the code but docstrings, with `GAP` for values, without signs around names."""
    found = [
        re.sub(r"[`']|%[\d.]*[sdrf]", lambda sign: GAP if sign[0][0] == "%" else "", text)
        for path in sorted((ROOT / "roll").rglob("*.py"))
        for text in _texts(ast.parse(path.read_text(encoding="utf-8")))
    ]
    return tuple(dict.fromkeys(found))


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts in a piece of code."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else GAP for p in parts)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _texts(child)


@pytest.mark.slow
@pytest.mark.parametrize("message", MESSAGES)
def test_the_code_has_every_message_of_the_page(message: str) -> None:
    assert len(message.replace("...", "")) > 10, "too short to be found again"
    assert any(map(pattern(message.replace("'", "")).search, texts())), message


def test_the_page_has_messages_of_every_situation() -> None:
    sections = PAGE.split("\n## ")[1:]
    assert len(sections) == 10
    assert all(re.search(r"^\| `", section, re.MULTILINE) for section in sections)


@pytest.mark.parametrize("setting", REFUSED)
def test_a_refused_setting_is_told_as_on_the_page(setting: str) -> None:
    assert REFUSED[setting] in MESSAGES
    with pytest.raises(ConfigError) as error:
        load_config(ROOT / "examples" / "rlvr_quickstart" / "run.yaml", [setting])
    told = re.sub(r"[`']", "", str(error.value))
    assert pattern(REFUSED[setting]).search(told), told
