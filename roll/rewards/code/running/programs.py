"""Programs that read standard input and write standard output: built once, run for each case."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from roll.rewards.code.running.languages import LANGUAGES, command_of
from roll.rewards.code.verdict import Kind, Verdict, without_result
from roll.sandbox import Limits, Outcome, Sandbox, Status

BUILD = Limits(
    cpu_s=60,
    wall_s=600,
    memory_mb=2048,
    processes=128,
    output_bytes=2**26,
    files=4096,
    disk_mb=256,
    addresses_mb=8192,
)
"""Limits of a compiler."""
MOST_BUILT = 2**26
"""Bytes of the files that a compiler makes."""

_CHECK = "import sys\ncompile(sys.stdin.buffer.read(), 'program.py', 'exec', dont_inherit=True)\n"

_BUILD = """
import base64, glob, io, os, subprocess, sys, zipfile
own = dict(HOME=os.getcwd(), GOCACHE=os.getcwd() + "/.go", CGO_ENABLED="0")
done = subprocess.run(
    {build!r}, stdin=subprocess.DEVNULL, stdout=sys.stderr, env={{**os.environ, **own}}
)
if done.returncode:
    sys.exit(1)
packed = io.BytesIO()
with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
    for name in glob.glob({built!r}, recursive=True):
        made.write(name)
sys.stdout.write(base64.b64encode(packed.getvalue()).decode())
"""

_RUN = """
import os
for name in {names!r}:
    os.chmod(name, 0o755)
os.execv({command[0]!r}, {command!r})
"""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that can be run."""

    text: str
    """What the sandbox runs; empty if it runs `command` instead."""
    files: Mapping[str, bytes]
    """Files that it finds in its folder."""
    command: Sequence[str] = ()
    """Words of a command; `{memory}` stands for the limit in MB."""
    language: str = "python"

    async def run(self, sandbox: Sandbox, stdin: str, limits: Limits) -> Outcome:
        """Run it on a standard input, in a process of its own.

        The limits on memory and disk are raised by what its language and its files need.
        """
        text, memory = self.text, str(int(limits.memory_mb))
        language = self.language
        if self.command:
            language = "python"  # that of what starts the command
            command = [word.replace("{memory}", memory) for word in self.command]
            own = [name for name in self.files if command[0] == f"./{name}"]
            text = _RUN.format(names=own, command=command)
        row = LANGUAGES[self.language]
        used_mb = limits.memory_mb + row.uses_mb
        limits = replace(limits, memory_mb=used_mb, addresses_mb=used_mb + row.reserves_mb)
        size = sum(map(len, self.files.values())) / 2**20
        if size > limits.disk_mb / 2:
            limits = replace(limits, disk_mb=2 * size)
        return await sandbox.run(text, stdin, self.files, limits, language)


async def build(sandbox: Sandbox, language: str, source: str) -> Program | Verdict:
    """Return a program that can be run, or the verdict that its text is wrong.

    Args:
        sandbox: runs the compiler.
        language: key of `LANGUAGES`.
        source: text of the program.

    Raises:
        SandboxError: the sandbox failed.
    """
    row = LANGUAGES[language]
    if not row.run:
        outcome = await sandbox.run(_CHECK, source, limits=replace(BUILD, memory_mb=1024))
        return Program(source, {}) if outcome.ok else _not_built(outcome)
    if language in sandbox.languages:  # a host compiles it, whenever it runs
        return Program(source, {}, language=language)
    text = _BUILD.format(build=command_of(row.build), built=row.built)
    outcome = await sandbox.run(text, files={row.file: source}, limits=BUILD)
    files = _unpacked(outcome.stdout) if outcome.ok else None
    if files is None:
        return _not_built(outcome)
    if not row.built:
        files = {row.file: source.encode("utf-8", "replace")}
    elif not files:
        return Verdict(Kind.NOT_COMPILED, "the compiler has made nothing")
    return Program("", files, command_of(row.run), language)


async def try_language(sandbox: Sandbox, language: str) -> str:
    """Return why programs in a language do not work in a sandbox; empty if they do.

    Raises:
        SandboxError: the sandbox failed.
        ConfigError: a tool is not installed.
    """
    program = await build(sandbox, language, LANGUAGES[language].hello)
    if isinstance(program, Verdict):
        return f"the compiler failed: {program.why}"
    outcome = await program.run(sandbox, "19 23", Limits())
    return "" if outcome.stdout.strip() == "42" else f"a program failed: {outcome.reason}"


def _not_built(outcome: Outcome) -> Verdict:
    """Return the verdict `NOT_COMPILED`, with the reason of the compiler's end."""
    found = without_result(outcome)
    return Verdict(Kind.NOT_COMPILED, found.why)


def _unpacked(text: str) -> dict[str, bytes] | None:
    """Return the files that a compiler has made; None if they are no archive, or too large."""
    try:
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(text, validate=True))) as made:
            if sum(each.file_size for each in made.infolist()) > MOST_BUILT:
                return None
            return {name: made.read(name) for name in made.namelist()}
    except (ValueError, binascii.Error, zipfile.BadZipFile, OSError):
        return None


def ended_well(outcome: Outcome) -> Verdict | None:
    """Return None if a program has ended by itself without an error, else the verdict."""
    return None if outcome.status is Status.OK and not outcome.cut else without_result(outcome)


async def in_order(
    judges: Sequence[Callable[[], Awaitable[Verdict]]], width: int, stop: bool
) -> list[Verdict]:
    """Return the verdicts of cases, which are judged `width` at a time.

    Args:
        judges: functions that judge one case each.
        width: cases at the same time.
        stop: leave out what comes after the first case that fails. The result does not depend on
            which case ends first. A text that is no program fails all of them, so nothing comes
            after that.
    """
    verdicts: list[Verdict] = []
    running: list[asyncio.Future[Verdict]] = []
    try:
        for place in range(len(judges)):
            while len(running) < min(place + width, len(judges)):
                running.append(asyncio.ensure_future(judges[len(running)]()))
            verdicts.append(await running[place])
            if verdicts[-1].kind is Kind.NOT_COMPILED or (stop and not verdicts[-1].passed):
                break
    finally:
        for each in running:
            each.cancel()
    return verdicts
