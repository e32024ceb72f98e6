"""docs/commands.md is what the parsers say, and every command line of the pages can be parsed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer

from docs import generate_commands

ROOT = Path(__file__).parents[2]
APPS = {program: app for program, _, app in generate_commands.PROGRAMS}
COMMANDS = [
    command
    for program, app in APPS.items()
    for command in generate_commands.commands_of(program, app)
]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "mcore_adapter/README.md")),
    *(page for page in ROOT.glob("docs/*.md") if page != generate_commands.TARGET),
    *ROOT.glob("docker/*.md"),
    *ROOT.glob("examples/**/*.md"),
]


@cache
def parser_of(program: str, *words: str) -> Any:
    """The parser of a command; KeyError if there is none."""
    if not words:
        return typer.main.get_command(APPS[program])
    return parser_of(program, *words[:-1]).commands[words[-1]]


def parse(line: str, *, whole: bool = True) -> None:
    """Parse a command line as the program does, without running it.

    Raises:
        KeyError: there is no such command.
        Exception: an error of typer's; one for a missing argument only if the line is `whole`.
    """
    lexer = shlex.shlex(
        line.replace("[", "").replace("]", ""), posix=True, punctuation_chars="|&;>"
    )
    lexer.whitespace_split = True
    words = [*takewhile(lambda word: word not in ("|", "&", ";", ">"), lexer)]
    names = [words.pop(0)]
    while words and hasattr(parser_of(*names), "commands"):
        names.append(words.pop(0))
    try:
        parser_of(*names).make_context(names[-1], words)
    except Exception as error:
        if whole or type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
            raise


def lines_of(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield the command lines of a page: whole ones in blocks, and those named in the text."""
    text = page.read_text(encoding="utf-8")
    start = r"(?:roll|mcore-adapter) [a-z]"
    fenced = re.compile(r"^ *```(\w*)\n(.*?)```", re.DOTALL | re.MULTILINE)
    for language, block in fenced.findall(text):
        if language in ("text", "sh", "bash", "console", ""):
            block = block.replace("\\\n", " ")
            for line in re.findall(rf"(?:^ *(?:\$ )?|&& )({start}[^&\n]*)", block, re.MULTILINE):
                yield line, True
    for span in re.findall(rf"`({start}[^`]*)`", fenced.sub("", text)):
        yield " ".join(span.split()), False


def test_the_page_of_commands_is_up_to_date() -> None:
    found = generate_commands.TARGET.read_text(encoding="utf-8")
    assert found == generate_commands.text(), "run: python -m docs.generate_commands"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_the_example_of_a_command_is_one_of_it(command: generate_commands.Command) -> None:
    assert command.example.startswith(command.name)
    parse(command.example)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_the_options_of_the_page_are_those_of_the_parser(
    command: generate_commands.Command,
) -> None:
    parser = parser_of(*command.name.split())
    known = {name for each in parser.params for name in each.opts if name.startswith("-")}
    told = [each.words.split(", ") for each in generate_commands.parameters(command.run)]
    assert {name for names in told for name in names if name.startswith("-")} == known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_of_a_page_can_be_parsed(page: Path) -> None:
    for line, whole in lines_of(page):
        try:
            parse(line, whole=whole)
        except Exception as error:
            raise AssertionError(f"{page.name}: {line}: {error!r}") from error
