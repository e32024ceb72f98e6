"""Copies of complete checkpoints at a URL that fsspec knows, and the way back.

A copy is complete when its `state.json` is there, which is copied last.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from roll.config.run import RunConfig
from roll.core.errors import CheckpointError, ConfigError
from roll.output_dir.checkpoints import STATE, Checkpoints, restore_folder, write_folder

logger = logging.getLogger(__name__)

PAUSES_S = (2.0, 15.0, 60.0)
"""Time before each further attempt to copy a file, in seconds."""
LOOK_S = 0.2
MAX_HELD = 8
"""Number of checkpoints that are kept for their copies; the oldest that waits gives way."""


def is_url(name: str) -> bool:
    """Return whether `name` is a URL, not a path."""
    return "://" in name


def check_urls(config: RunConfig) -> None:
    """Raise ConfigError unless fsspec has a file system for each URL of checkpoints that the config
    names. Nothing is connected to."""
    named = {"checkpoint.upload": config.checkpoint.upload, "resume": config.resume}
    for key, url in named.items():
        if url is None or not is_url(url):
            continue
        import fsspec  # at its first use: most runs copy nothing

        try:
            fsspec.get_filesystem_class(url.partition("://")[0])
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{key}: fsspec cannot open {url}: {error}") from error


class Uploads:
    """Copies of checkpoints at a URL, made one after the other in a thread.

    An error ends nothing: a file is tried again, then its checkpoint is given up, with a warning.
    """

    def __init__(self, url: str, *, limit_s: float, pauses_s: Sequence[float] = PAUSES_S) -> None:
        """Start the thread.

        Args:
            url: folder for the copies; each gets the name of its checkpoint.
            limit_s: time for a file after which `wait` gives up, in seconds.
            pauses_s: time before each further attempt, in seconds.
        """
        self._url = url.rstrip("/")
        self._limit_s = limit_s
        self._pauses_s = pauses_s
        self._held: list[tuple[Path, bool]] = []
        """Checkpoints that are not copied yet, oldest first, each with whether it replaces a copy
        of its name. The first one is under way."""
        self._changed = threading.Condition()
        """Lock of `_held`, told of each checkpoint that is added."""
        self._moved_s = self._told_s = time.monotonic()
        """Times of the last progress, and of the last warning that there is none."""
        self._failed: dict[str, str] = {}
        """Checkpoints that were given up, by name, with the reason."""
        # A daemon, so that a network that hangs does not keep the process alive.
        threading.Thread(target=self._work, name="roll-upload", daemon=True).start()

    @property
    def held(self) -> frozenset[Path]:
        """Checkpoints that must not be deleted yet."""
        with self._changed:
            return frozenset(checkpoint for checkpoint, _ in self._held)

    def add(self, checkpoint: Path, *, replace: bool = True) -> None:
        """Have a complete checkpoint copied. If too many wait, the oldest of them is given up: none
        of those that wait may be deleted, and the disk would fill.

        Args:
            replace: copy it even if a copy of it is there. Else it is of an earlier session, and
                none is given up for it.
        """
        with self._changed:
            if not self._held:
                self._moved_s = self._told_s = time.monotonic()
            self._held.append((checkpoint, replace))
            self._changed.notify()
            if not replace or len(self._held) <= MAX_HELD:
                return
            given_up, _ = self._held.pop(1)
            later = len(self._held) - 1
        self._failed[given_up.name] = (
            f"it was given up, as {later} later ones waited for the one under way"
        )
        logger.warning(
            "%s is not copied to %s: more than %d checkpoints wait for their copies, which are too "
            "slow; raise checkpoint.every",
            *(given_up, self._url, MAX_HELD),
        )

    def look(self) -> None:
        """Warn if a copy has made no progress for the time limit of a file, or that long again."""
        now_s = time.monotonic()
        if self.held and now_s - max(self._moved_s, self._told_s) > self._limit_s:
            self._told_s = now_s
            logger.warning(
                "the copy of checkpoints to %s has made no progress for %.0f s; %d wait for it",
                *(self._url, now_s - self._moved_s, len(self.held)),
            )

    def wait(self) -> None:
        """Wait until all copies are made or given up; warn which ones are missing."""
        self._moved_s = time.monotonic()
        while self.held:
            if time.monotonic() - self._moved_s > self._limit_s:
                logger.warning("waited %g s for the copy of a file", self._limit_s)
                break
            time.sleep(LOOK_S)
        missing = {path.name: "it was not copied in time" for path in self.held}
        for name, reason in (self._failed | missing).items():
            logger.warning("%s is not at %s: %s", name, self._url, reason)

    def _work(self) -> None:
        """Copy one checkpoint after the other, for ever."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held)
                checkpoint, replace = self._held[0]
            try:
                self._copy(checkpoint, replace=replace)
                self._failed.pop(checkpoint.name, None)
            except Exception as error:  # noqa: BLE001 - the run goes on without the copy
                self._failed[checkpoint.name] = str(error)
                logger.warning("%s is not copied: %s", checkpoint, error)
            with self._changed:
                self._held.pop(0)

    def _copy(self, checkpoint: Path, *, replace: bool) -> None:
        """Copy a checkpoint, its state last; CheckpointError if a file could not be copied."""
        target = f"{self._url}/{checkpoint.name}"
        mark = f"{target}/{STATE}"
        if not replace and self._tried(mark, partial(_is_there, checkpoint / STATE)):
            return
        self._tried(mark, _remove)
        files = [path for path in checkpoint.rglob("*") if path.is_file()]
        for file in sorted(files, key=lambda path: (path == checkpoint / STATE, path)):
            name = f"{target}/{file.relative_to(checkpoint).as_posix()}"
            self._tried(name, partial(_put, file))

    def _tried(self, url: str, work: Callable[[Any, str], Any]) -> Any:
        """Call `work` with the file system and the path of `url`; again after each pause if it
        fails. CheckpointError after the last attempt."""
        for pause_s in (*self._pauses_s, None):
            self._moved_s = time.monotonic()
            try:
                fs, path = _file_system(url)
                return work(fs, path)
            except Exception as error:
                what = f"{url}: {type(error).__name__}: {error}"
                if pause_s is None:
                    raise CheckpointError(what) from error
                logger.warning("%s; trying again in %g s", what, pause_s)
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")


def copy_missing(config: RunConfig) -> None:
    """Copy the checkpoints of a run to `checkpoint.upload` of which no copy is there: the session
    that wrote them may have been killed. Return when they are copied or given up."""
    url = config.checkpoint.upload
    complete = Checkpoints(Path(config.output_dir) / "checkpoints", config.checkpoint).complete()
    if url is not None and complete:
        uploads = Uploads(url, limit_s=config.cluster.call_timeout_s)
        for _, checkpoint in complete:
            uploads.add(checkpoint, replace=False)
        uploads.wait()


def _is_there(file: Path, fs: Any, path: str) -> bool:
    """Return whether a file has a copy with the same content."""
    return bool(fs.exists(path)) and fs.cat_file(path) == file.read_bytes()


def _remove(fs: Any, path: str) -> None:
    """Delete a file, if it is there."""
    if fs.exists(path):
        fs.rm(path)


def _put(file: Path, fs: Any, path: str) -> None:
    """Copy a file, and compare the sizes; OSError if they differ."""
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.put_file(str(file), path)
    size, found = file.stat().st_size, fs.size(path)
    if found != size:
        raise OSError(f"the copy of {file} has {found} of {size} bytes")


def fetched(url: str, output_dir: Path) -> Path:
    """Copy a complete checkpoint from a URL into `<output_dir>/fetched`, unless it is there: a copy
    of what the URL holds now, or of what it held when it could be reached.

    Returns:
        The folder of the copy.

    Raises:
        CheckpointError: there is no complete checkpoint at the URL, or it cannot be copied.
    """
    url = url.rstrip("/")
    short = hashlib.sha256(url.encode()).hexdigest()[:8]
    folder = output_dir / "fetched" / f"{url.rpartition('/')[2]}-{short}"
    restore_folder(folder)
    if (folder / STATE).is_file() and _is_current(folder, url):
        return folder

    def write(aside: Path) -> None:
        for path in found:
            file = aside / path.removeprefix(root).lstrip("/")
            if ".." in file.parts:  # a key of an object store may be any text
                raise CheckpointError(f"resume: {url} has a file outside its folder: {path}")
            file.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(path, str(file))

    try:
        fs, root = _file_system(url)
        if not fs.exists(f"{root}/{STATE}"):
            raise CheckpointError(f"resume: {url} is no complete checkpoint ({STATE} is missing)")
        found = fs.find(root)
        logger.info("copying %s, %d files", url, len(found))
        write_folder(folder, write)
    except CheckpointError:
        raise
    except Exception as error:
        shutil.rmtree(folder.with_name(f".writing_{folder.name}"), ignore_errors=True)
        raise CheckpointError(
            f"resume: {url} cannot be copied: {type(error).__name__}: {error}"
        ) from error
    return folder


def _is_current(folder: Path, url: str) -> bool:
    """Return whether a copy is that of the checkpoint at a URL. A warning tells if the URL cannot
    be read."""
    try:
        fs, root = _file_system(url)
        there = fs.cat_file(f"{root}/{STATE}")
    except Exception as error:  # noqa: BLE001 - what fsspec's file systems raise is not known
        logger.warning(
            "%s cannot be read (%s: %s); going on from the copy of before, %s",
            *(url, type(error).__name__, error, folder),
        )
        return True
    if there == (folder / STATE).read_bytes():
        return True
    logger.warning("%s holds another checkpoint than before, and is copied anew", url)
    return False


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there."""
    from fsspec.core import url_to_fs

    found: tuple[Any, str] = url_to_fs(url)
    return found
