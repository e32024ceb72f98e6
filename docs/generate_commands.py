"""Generator of docs/commands.md: the command lines, made from the functions that they call.

    python -m docs.generate_commands

What a command does is its docstring, and its example the `epilog` that `--help` shows, too. A test
fails if the file differs from what this script would write, or if an example cannot be parsed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

from mcore_adapter.cli import app as adapter_app
from roll.cli import app as roll_app

TARGET = Path(__file__).parent / "commands.md"
PROGRAMS: tuple[tuple[str, str, typer.Typer], ...] = (
    ("roll", "", roll_app),
    (
        "mcore-adapter",
        "A command of its own, which comes with [mcore_adapter](../mcore_adapter/README.md).",
        adapter_app,
    ),
)
"""Name of a program -> what is said of it beside its own help."""

INTRO = """\
# Commands

Every command with its arguments, made from the code that reads them; `--help` of a command prints
the same. Values in capitals are yours to replace.
"""

TYPES = {int: "integer", float: "number", str: "text", Path: "path"}


@dataclass(frozen=True)
class Command:
    """One command as a user types it."""

    name: str
    """All its words, as in `roll examples copy`."""
    run: Callable[..., Any]
    example: str
    """A whole command line; empty if there is none."""

    @property
    def about(self) -> str:
        """The paragraphs of the help."""
        paragraphs = (inspect.getdoc(self.run) or "").split("\n\n")
        return "\n\n".join(_plain(" ".join(each.split())) for each in paragraphs)

    @property
    def anchor(self) -> str:
        """The anchor of its heading."""
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Parameter:
    """An argument or an option of a command."""

    words: str
    """What is typed, such as `--output, -o`."""
    usage: str
    """Its place in the line that shows how the command is called; empty for options."""
    value: str
    """Type and limits of its value."""
    default: str
    meaning: str

    @property
    def row(self) -> str:
        """Its row of a table."""
        cells = (f"`{self.words}`", self.value, self.default, _plain(self.meaning))
        return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def text() -> str:
    """Return the page, in Markdown."""
    parts = [INTRO]
    for program, about, app in PROGRAMS:
        commands = list(commands_of(program, app))
        shared = _shared(commands)
        parts += [f"## {program}\n", f"{_plain(str(app.info.help))} {about}".strip() + "\n"]
        parts.append(f"{_plain(str(app.info.epilog))}\n")
        parts.append("| command | |\n|---|---|")
        parts += [
            f"| [`{command.name}`](#{command.anchor}) | {_first_sentence(command.about)} |"
            for command in commands
        ]
        parts.append("")
        if shared:
            parts += ["Every command takes:\n", *_table(shared)]
        for command in commands:
            parts += _told(command, shared)
    return "\n".join(parts).rstrip() + "\n"


def commands_of(program: str, app: typer.Typer) -> Iterator[Command]:
    """Yield the commands of a program in the order of its help, those of its groups included."""
    for command in app.registered_commands:
        assert command.callback is not None
        example = (command.epilog or "").removeprefix("Example: ")
        yield Command(f"{program} {command.name}", command.callback, example)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands_of(f"{program} {group.name}", group.typer_instance)


def parameters(run: Callable[..., Any]) -> list[Parameter]:
    """Return the arguments and options of a command, in the order of its signature."""
    found = []
    for name, parameter in inspect.signature(run, eval_str=True).parameters.items():
        annotation, info = get_args(parameter.annotation)
        required = parameter.default is inspect.Parameter.empty
        unset = parameter.default is None or parameter.default is False or parameter.default == ""
        default = "required" if required else "" if unset else f"`{parameter.default}`"
        if isinstance(info, ArgumentInfo):
            words = info.metavar or name.upper()
            usage = words if required else f"[{words}]"
            if _base(annotation)[1]:
                usage += "..."
        else:
            assert isinstance(info, OptionInfo)
            # In an `Annotated`, typer keeps the first name where a default would stand.
            names = [
                each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)
            ]
            words = ", ".join(names or [f"--{name.replace('_', '-')}"])
            usage = f"{words} {name.upper()}" if required else ""
        value = _value(annotation, info)
        found.append(Parameter(words, usage, value, default, info.help or ""))
    return found


def _told(command: Command, shared: list[Parameter]) -> Iterator[str]:
    """Yield the section of a command."""
    own = [each for each in parameters(command.run) if each not in shared]
    words = [each.usage for each in own if each.usage]
    options = ["[OPTIONS]"] if any(not each.usage for each in own) else []
    usage = " ".join([command.name, *words, *options])
    yield f"### {command.name}\n"
    yield f"{command.about}\n"
    yield f"```text\n{usage}\n```\n"
    if own:
        yield from _table(own)
    if command.example != usage:
        yield f"Example: `{command.example}`\n"


def _table(parameters: list[Parameter]) -> Iterator[str]:
    """Yield a table of arguments and options."""
    yield "| | value | default | meaning |\n|---|---|---|---|"
    yield from (each.row for each in parameters)
    yield ""


def _shared(commands: list[Command]) -> list[Parameter]:
    """Return the options that all commands have."""
    first, *others = (parameters(command.run) for command in commands)
    return [each for each in first if all(each in other for other in others)]


def _value(annotation: Any, info: ArgumentInfo | OptionInfo) -> str:
    """Return the type of a value with its limits, and that it may be repeated."""
    kind, many = _base(annotation)
    if kind is bool:
        return "no value"
    if info.min is not None:
        limits = f", {info.min} to {info.max}" if info.max is not None else f" ≥ {info.min}"
    else:
        limits = ""
    repeated = ", several" if many and isinstance(info, ArgumentInfo) else ""
    repeated = ", may be repeated" if many and isinstance(info, OptionInfo) else repeated
    return TYPES[kind] + limits + repeated


def _base(annotation: Any) -> tuple[type, bool]:
    """Return the type of one value, and whether there may be several."""
    options = [each for each in get_args(annotation) if each is not type(None)]
    if get_origin(annotation) is list:
        return options[0], True
    return _base(options[0]) if options else (annotation, False)


def _first_sentence(about: str) -> str:
    """Return a text up to its first full stop, colon or semicolon, without remarks in brackets."""
    without = re.sub(r" \(\[[^)]*\)\)", "", about)
    return re.split(r"(?<=\w)[.:;](?:\s|$)", without)[0]


def _plain(text: str) -> str:
    """Return a text with links to the pages that it names, and without signs of Markdown."""
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
