"""The levels of isolation, and what a job of each can see."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Sequence
from typing import Any

LEVELS = ("namespaces", "landlock", "strict")
"""Levels that isolate, the strongest first; `auto` takes the first that passes its self-test."""

REMOTE = "remote"
"""Programs run on other hosts; what isolates them is said there."""
NONE = "none"
"""Limits without isolation, for programs that are trusted."""

NEEDS = {
    "namespaces": "Linux 5.14 with user namespaces, which containers' default profiles refuse",
    "landlock": "Linux 5.13 with landlock, and seccomp",
    "strict": "seccomp",
}

# Modules that programs import most: a job finds them in memory. Forks of a larger template take
# longer, so those that are large and seldom used are imported for `strict` alone, whose jobs can
# import nothing else.
STANDARD = """
abc array ast base64 binascii bisect calendar cmath collections collections.abc contextlib copy
csv dataclasses datetime decimal difflib enum fractions functools gc hashlib heapq inspect io
itertools json keyword linecache locale math numbers operator os pathlib pickle platform queue
random re select signal statistics string struct sys textwrap threading time timeit token tokenize
traceback types typing unicodedata uuid warnings weakref zlib
encodings.ascii encodings.latin_1
"""
SELDOM = """
argparse asyncio bz2 codecs colorsys concurrent.futures configparser cProfile ctypes doctest fnmatch
getpass glob graphlib gzip hmac html http ipaddress logging lzma mmap multiprocessing optparse
plistlib pprint profile pstats pydoc quopri reprlib resource sched secrets selectors shelve shlex
shutil socket sqlite3 ssl stringprep subprocess symtable tempfile tracemalloc unittest unittest.mock
urllib.parse urllib.request wave xml.dom.minidom xml.etree.ElementTree zipfile zoneinfo
encodings.cp1252 encodings.idna encodings.unicode_escape encodings.raw_unicode_escape
encodings.utf_16 encodings.utf_16_be encodings.utf_16_le encodings.utf_32 encodings.utf_8_sig
"""

_PACKAGES = ("site-packages", "dist-packages")

# Shared libraries, commands and time zones. Not all of /usr: images keep projects in /usr/src.
_SYSTEM = """
/bin /lib /lib64 /usr/bin /usr/lib /usr/lib64 /usr/local/lib /usr/share/zoneinfo
/etc/ld.so.cache /etc/localtime
"""


def settings(level: str, preload: Sequence[str], readable: Sequence[str]) -> dict[str, Any]:
    """Return what a template of a level needs to know: `level`, `places`, `path`, `preload` and
    `optional` of `inside.template.Template`.

    Args:
        level: one of `LEVELS`, or `none`.
        preload: modules to import beside `STANDARD`.
        readable: further folders that jobs may read and import from.
    """
    library = os.path.dirname(os.__file__)
    standard = [library, os.path.join(library, "lib-dynload")]
    # `sys.path` has those of the user and of a virtual environment that sees the system's. Other
    # folders of it may be a project's, which programs should not read.
    known = [each for each in sys.path if os.path.basename(each) in _PACKAGES]
    packages = [each for each in (*site.getsitepackages(), *known) if os.path.isdir(each)]
    path = [os.path.abspath(each) for each in (*standard, *packages, *readable)]
    places = [*path, *(os.path.join(sys.base_prefix, each) for each in ("lib", "bin"))]
    places += _SYSTEM.split()
    shown = [each for each in dict.fromkeys(places) if os.path.lexists(each)]
    return {
        "level": level,
        "places": shown,
        "path": list(dict.fromkeys(path)),
        "preload": [*STANDARD.split(), *preload],
        "optional": SELDOM.split() if level == "strict" else [],
    }
