"""Key of the tokenized rows of a source: a hash of everything that they depend on."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from roll.config.sections.data import FileConfig
from roll.data.readers import hub_files
from roll.data.sources import local_path, resolve_format
from roll.data.store.making import Maker
from roll.data.store.users_code import users_code_hash
from roll.platform.machine import cores

BLOCK_BYTES = 1 << 24
"""Bytes of a file that are hashed at a time."""
PACKAGES = ("transformers", "tokenizers", "jinja2", "pyarrow", "datasets")
"""Packages whose versions are in the key."""
NOT_IN_ROWS = {"weight", "made_by"}
"""Settings of a source on which its tokenized rows do not depend."""


def files_of(source: FileConfig) -> list[Path]:
    """Return the files of which the rows of a source are read; DataError as in
    `resolve_format`."""
    form, path = resolve_format(source), local_path(source)
    if form == "hub":
        return hub_files(source)
    if form == "disk":
        return sorted(each for each in path.rglob("*") if each.is_file())
    return [path]


def states_of(files: Iterable[Path]) -> list[tuple[int, int]]:
    """Return size and time of the last change of each file: both stay while nobody writes."""
    return [(found.st_size, found.st_mtime_ns) for found in (file.stat() for file in files)]


def key_of(name: str, source: FileConfig, maker: Maker[Any], files: Iterable[Path]) -> str:
    """Return the hash of content and settings of a source, its tokenizer and template, and of the
    code that makes the rows; 32 hexadecimal digits.

    Args:
        name: name of the source, which the ids of its rows begin with.
        files: files of the source.
    """
    told = [
        name,
        source.model_dump(mode="json", exclude=NOT_IN_ROWS),
        maker.identity,
        content_hash(files),
        _tokenizer_hash(maker.tokenizer),
        _code_hash(),
        [users_code_hash(path) for path in (source.fn, maker.template) if path is not None],
        [importlib.metadata.version(package) for package in PACKAGES],
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def content_hash(files: Iterable[Path]) -> str:
    """Return a hash of the bytes of files, by all cores: of their blocks' hashes."""
    blocks = [
        (file, start)
        for file in files
        for start in range(0, max(file.stat().st_size, 1), BLOCK_BYTES)
    ]
    with ThreadPoolExecutor(len(cores())) as pool:
        return hashlib.sha256(b"".join(pool.map(_block_hash, blocks))).hexdigest()


def _block_hash(block: tuple[Path, int]) -> bytes:
    """Return the hash of a block of a file, from a byte on."""
    path, start = block
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        digest = hashlib.sha256(f"{start} ".encode())
        for _ in range(BLOCK_BYTES >> 20):
            if not (data := file.read(1 << 20)):
                break
            digest.update(data)
        return digest.digest()


def _tokenizer_hash(tokenizer: Any) -> str:
    """Return a hash of all files that `save_pretrained` writes: vocabulary, special tokens, chat
    template; and of the time that a template sees, if it asks for it."""
    moment: datetime | None = getattr(tokenizer, "moment", None)
    plain = getattr(tokenizer, "tokenizer", tokenizer)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix="roll_tokenizer_") as folder:
        plain.save_pretrained(folder)
        for path in sorted(each for each in Path(folder).rglob("*") if each.is_file()):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    if moment is not None:
        digest.update(json.dumps(times_told(plain.chat_template, moment)).encode())
    return digest.hexdigest()


def times_told(template: Any, moment: datetime) -> list[str]:
    """Return what a chat template learns of a moment: a text for each format that it asks for, or
    the moment itself if a format is no plain text in the template.

    Args:
        template: text of the template, or texts by their names; None without one.
    """
    texts = template.values() if isinstance(template, Mapping) else [template]
    uses = [use for text in texts for use in _USE.finditer(str(text))]
    if any(use["format"] is None for use in uses):
        return [moment.isoformat()]
    return [moment.strftime(use["format"]) for use in uses]


_USE = re.compile(
    r"""\bstrftime_now\b (?!\s+is\s+(?:not\s+)?defined\b)
    (?: \s* \( \s* (?P<quote>["']) (?P<format> (?:(?!(?P=quote)|\\).)* ) (?P=quote) \s* \) )?""",
    re.VERBOSE,
)
"""Use of the time in a template, with its format if that is a plain text."""


@functools.cache
def _code_hash() -> str:
    """Return a hash of all modules of `roll.data` and of the classes of its rows."""
    data = Path(__file__).parents[1]
    modules = [*data.rglob("*.py"), data.parent / "core/types.py", data.parent / "core/hub.py"]
    digest = hashlib.sha256()
    for module in sorted(modules):
        digest.update(f"{os.path.relpath(module, data)} ".encode() + module.read_bytes())
    return digest.hexdigest()
