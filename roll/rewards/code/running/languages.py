"""The languages that programs may be written in: how each is built and run, by a table.

Python runs at every level of the sandbox. The others are processes of their own, so they need the
level `namespaces`, and their tools on the machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roll.config.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Language:
    """A row of the table. Commands run in the program's folder; `{tool}` stands for a tool's path.

    A word of a command such as `{g++}` becomes the path of this tool.
    """

    labels: tuple[str, ...]
    """Labels of fenced blocks, in lower case."""
    file: str = ""
    """Name of the file with the program's text."""
    build: tuple[str, ...] = ()
    """Command that makes `built`, or checks the text; it fails if the text is wrong."""
    built: str = ""
    """Pattern of the files that `build` makes and `run` needs; empty: the text itself."""
    run: tuple[str, ...] = ()
    """Command that runs the program; empty for Python, which the sandbox runs itself."""
    tools: tuple[str, ...] = ()
    """Commands that must be installed."""
    places: Callable[[], tuple[str, ...]] = lambda: ()
    """Function that returns further folders that the tools read."""
    uses_mb: int = 0
    """Memory that the language takes beside the program's own."""
    reserves_mb: int = 0
    """Addresses that it reserves beside that memory."""
    hello: str = ""
    """Program that prints the sum of two numbers of its input, as a test."""


def _of_rust() -> tuple[str, ...]:
    """Return the folder of the toolchain, which rustup keeps in a home folder."""
    return (_asked("rustc", "--print", "sysroot"), "/etc/alternatives")


def _of_go() -> tuple[str, ...]:
    """Return the folder of the Go tools."""
    return (_asked("go", "env", "GOROOT"),)


def _of_java() -> tuple[str, ...]:
    """Return the folder of the JDK, and that of its settings, to which it has links."""
    home = Path(os.path.realpath(shutil.which("javac") or "/")).parent.parent
    conf = home / "conf" / "security"
    settings = {str(each.resolve().parent) for each in conf.glob("*") if each.is_symlink()}
    return (str(home), *sorted(settings))


_JVM = ("-XX:+UseSerialGC", "-XX:CompressedClassSpaceSize=64m", "-XX:ReservedCodeCacheSize=64m")

LANGUAGES: dict[str, Language] = {
    "python": Language(labels=("python", "py", "python3", "python2", "py3", "pypy", "pypy3")),
    "cpp": Language(
        labels=("cpp", "c++", "cc", "cxx", "c++17", "c++20", "cpp17", "cpp20"),
        file="program.cpp",
        build=("{g++}", "-O2", "-std=c++17", "-o", "program", "program.cpp"),
        built="program",
        run=("./program",),
        tools=("g++",),
        places=lambda: ("/usr/include", "/etc/alternatives"),
        hello="#include <iostream>\nint main() { long a, b; std::cin >> a >> b; "
        'std::cout << a + b << "\\n"; }',
    ),
    "javascript": Language(
        labels=("javascript", "js", "node", "nodejs"),
        file="program.js",
        build=("{node}", "--check", "program.js"),
        run=("{node}", "program.js"),
        tools=("node",),
        places=lambda: ("/usr/share/nodejs",),
        uses_mb=64,
        reserves_mb=4096,
        hello="const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number);\n"
        "console.log(a + b);",
    ),
    "go": Language(
        labels=("go", "golang"),
        file="program.go",
        build=("{go}", "build", "-o", "program", "program.go"),
        built="program",
        run=("./program",),
        tools=("go",),
        places=_of_go,
        reserves_mb=2048,
        hello='package main\nimport "fmt"\nfunc main() { var a, b int; fmt.Scan(&a, &b); '
        "fmt.Println(a + b) }",
    ),
    "java": Language(
        labels=("java",),
        file="Main.java",
        build=("{javac}", "-J-Xmx512m", *(f"-J{each}" for each in _JVM), "-d", ".", "Main.java"),
        built="**/*.class",
        run=("{java}", "-Xmx{memory}m", "-Xss64m", *_JVM, "-cp", ".", "Main"),
        tools=("javac", "java"),
        places=_of_java,
        uses_mb=256,
        reserves_mb=4096,
        hello="import java.util.*;\npublic class Main { public static void main(String[] a) {\n"
        "Scanner s = new Scanner(System.in); System.out.println(s.nextInt() + s.nextInt()); } }",
    ),
    "rust": Language(
        labels=("rust", "rs"),
        file="program.rs",
        build=(
            "{rustc}",
            "-O",
            "-Cstrip=symbols",
            "--edition",
            "2021",
            "-o",
            "program",
            "program.rs",
        ),
        built="program",
        run=("./program",),
        tools=("rustc", "cc"),
        places=_of_rust,
        hello="use std::io::*;\nfn main() { let mut s = String::new(); "
        "stdin().read_to_string(&mut s).unwrap();\n"
        'println!("{}", s.split_whitespace().map(|x| x.parse::<i64>().unwrap()).sum::<i64>()); }',
    ),
    "shell": Language(
        labels=("shell", "sh", "bash", "zsh"),
        file="program.sh",
        build=("{bash}", "-n", "program.sh"),
        run=("{bash}", "program.sh"),
        tools=("bash",),
        hello="read a b\necho $((a + b))",
    ),
}


@functools.cache
def tool_path(tool: str) -> str:
    """Return the path of a tool's own file, without the links and the proxies before it.

    Raises:
        ConfigError: it is not installed.
    """
    found = shutil.which(tool)
    if found is None:
        raise ConfigError(f"the command {tool!r} is not installed")
    if tool == "rustc":  # rustup's proxy of this name needs a home folder
        return os.path.join(_asked("rustc", "--print", "sysroot"), "bin", "rustc")
    if tool in ("java", "javac"):
        return os.path.realpath(found)
    return found


def command_of(words: tuple[str, ...]) -> list[str]:
    """Return a command with the paths of its tools.

    Raises:
        ConfigError: a tool is not installed.
    """
    return [tool_path(word[1:-1]) if word[:1] == "{" else word for word in words]


def places_of(language: str) -> tuple[str, ...]:
    """Return the folders that a sandbox must show for a language.

    Raises:
        ConfigError: a tool of it is not installed; the message names it.
    """
    row = LANGUAGES[language]
    try:
        for tool in row.tools:
            tool_path(tool)
        return tuple(each for each in row.places() if os.path.exists(each))
    except (ConfigError, OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"programs in {language} need its tools: {error}") from None


@functools.cache
def _asked(*command: str) -> str:
    """Return what a command prints, without white space around it.

    Raises:
        SubprocessError: the command failed, or ran longer than 60 s.
        OSError: it cannot be started.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()
