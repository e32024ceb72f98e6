"""Runs the text of a program in this process as Python itself would, and ends the process."""

from __future__ import annotations

import ast
import atexit
import builtins
import inspect
import linecache
import os
import random
import sys
import threading
import traceback
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

NAME = "program.py"
PACKAGE = __package__.partition(".")[0]


def main_module() -> ModuleType:
    """Put an empty module `__main__` in place of this process's, forget this package, return it."""
    for name in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    module = ModuleType("__main__")
    module.__dict__.update(__file__=NAME, __builtins__=builtins)
    sys.modules["__main__"] = module
    sys.argv[:] = [NAME]
    return module


def seed() -> None:
    """Make random numbers differ from those of other forks."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def run_to_end(source: bytes, module: ModuleType) -> NoReturn:
    """Run a program, then end the process with the exit code that Python would end it with."""
    leave(run(source, module))


def end(by: SystemExit) -> NoReturn:
    """End the process as `exit` in the main program does."""
    leave(_exit_code(by))


def leave(code: int) -> NoReturn:
    """Wait for threads, call what is registered for the exit, and end the process."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001  # of the program; e.g. its output is closed
        code = code or 120
    os._exit(code)


def run(source: bytes, module: ModuleType, echo: bool = False) -> int:
    """Run a program and return its exit code; a traceback goes to its standard error.

    Args:
        source: UTF-8, or another encoding that its first lines declare.
        module: where its names are.
        echo: show the value of the last line, as an interactive Python does.

    Raises:
        SystemExit: with `echo`, the program called `exit`.
    """
    sys.setrecursionlimit(1000 + _depth())
    try:
        _remember_lines(source)
        for code in _compiled(source, echo):
            exec(code, module.__dict__)
    except SystemExit as end:
        if echo:
            raise
        return _exit_code(end)
    except BaseException as error:  # noqa: BLE001  # whatever the program raises is its result
        _show(error)
        return 1
    return 0


def _depth() -> int:
    """Return how many calls the program's first line lies in."""
    frame, depth = inspect.currentframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def _compiled(source: bytes, echo: bool) -> list[CodeType]:
    """Compile a program; with `echo` a last line that is an expression apart, so that its value is
    shown."""
    if not echo:
        return [compile(source, NAME, "exec", dont_inherit=True)]
    tree = ast.parse(source, NAME)
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        return [compile(tree, NAME, "exec", dont_inherit=True)]
    last = ast.Interactive([tree.body.pop()])
    return [
        compile(tree, NAME, "exec", dont_inherit=True),
        compile(last, NAME, "single", dont_inherit=True),
    ]


def _remember_lines(source: bytes) -> None:
    """Let tracebacks show the lines of the program, which is no file."""
    text = source.decode("utf-8", "replace")
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)


def _exit_code(end: SystemExit) -> int:
    """Return the exit code of `SystemExit`, as Python has it; a code that is no number is
    printed."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _show(error: BaseException) -> None:
    """Print a traceback that begins in the program; if that is not possible, only the error's
    type."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace)
    except BaseException:  # noqa: BLE001  # an exception whose text raises; or out of memory
        os.write(2, f"{type(error).__name__}\n".encode())
