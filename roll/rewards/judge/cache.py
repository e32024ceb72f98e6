"""Answers of judges on disk, so that the same question is asked and paid once.

Each answer is a file of its own that gets its name when it is complete. So several runs may share a
folder, and a damaged file costs one question.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from roll.rewards.judge.question import Answer, Question

log = logging.getLogger(__name__)


class AnswerCache:
    """Answers in a folder, by model, settings and question."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        """Use a folder, which is made when the first answer comes.

        Args:
            folder: folder of the answers.
            identity: settings of the judge that change its answers.
        """
        self._folder = folder
        self._identity = identity
        self._warned = False

    async def get(self, question: Question) -> Answer | None:
        """Return the answer to a question; None if there is none, or it is damaged."""
        return await asyncio.to_thread(self._read, self._path(question))

    async def put(self, question: Question, answer: Answer) -> None:
        """Keep an answer; if the disk takes none, say so once."""
        await asyncio.to_thread(self._write, self._path(question), answer)

    def _path(self, question: Question) -> Path:
        """Return the path of the file for the answer to a question."""
        key = json.dumps([self._identity, asdict(question)], sort_keys=True)
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return self._folder / name[:2] / f"{name[2:]}.json"

    def _read(self, path: Path) -> Answer | None:
        """Return the answer in a file; None if there is no file, or it is damaged, which is
        logged."""
        try:
            found = json.loads(path.read_bytes())
            told, text = found["checksum"], found["text"]
            tokens = found["input_tokens"], found["output_tokens"]
            sound = told == _checksum(text) and all(n is None or type(n) is int for n in tokens)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as e:
            sound, told = False, e
        if not sound:
            self._warn(f"{path} is damaged ({told}); the question is asked again")
            return None
        return Answer(text, input_tokens=tokens[0], output_tokens=tokens[1], cached=True)

    def _write(self, path: Path, answer: Answer) -> None:
        """Write an answer to a file, which gets its name when it is complete. Errors of the disk
        are logged and not raised."""
        content = {
            "text": answer.text,
            "input_tokens": answer.input_tokens,
            "output_tokens": answer.output_tokens,
            "checksum": _checksum(answer.text),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
            try:
                with os.fdopen(number, "w") as file:
                    json.dump(content, file)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            self._warn(f"{self._folder} takes no answers ({error}); they are asked again next time")

    def _warn(self, line: str) -> None:
        """Log the first fault of the cache."""
        if not self._warned:
            self._warned = True
            log.warning("cache of judges: %s", line)


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
