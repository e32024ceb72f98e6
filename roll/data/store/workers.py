"""Processes that tokenize chunks of a source, in order, as fast as the cores allow."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from roll.core.errors import WaitTimeoutError, WorkerError
from roll.data.store.chunks import Chunk
from roll.data.store.making import Maker, UnstorableError, tokens_bytes
from roll.data.store.tally import Tally

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_TIMEOUT_S = 900.0
"""Time limit for one chunk, which has about a megabyte."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokenized rows of a chunk, in the form of the file."""

    batch: bytes
    """Record batch of `schema`."""
    numbers: bytes
    """Number of each row, counted from the first row of the chunk; int64."""
    hashes: bytes
    """Hash of the tokens of each row, 16 bytes each."""
    digests: bytes
    """Hash of the content of each row, 16 bytes each."""
    tags: Counter[str]
    """Number of rows with each tag."""
    tally: Tally


def schema() -> pa.Schema:
    """Return the columns of the file."""
    import pyarrow as pa

    return pa.schema(
        [
            ("tokens", pa.list_(pa.list_(pa.int32()))),
            ("trained", pa.list_(pa.list_(pa.int32()))),
            ("more", pa.string()),
        ]
    )


def encoded_part(chunk: Chunk, maker: Maker[Any], *, tokenizes: bool = True) -> Part:
    """Tokenize the rows of a chunk; or only look for mistakes in them.

    Raises:
        DataError: as in `Maker.make`.
        UnstorableError: a row cannot be kept in a file.
    """
    import numpy as np
    import pyarrow as pa

    made = maker.make(chunk.raw(), tokenizes=tokenizes)
    if made.tally.broken:
        raise UnstorableError("pictures")
    rows = [maker.encode(row) for row in made.rows]
    batch = pa.record_batch(
        [
            pa.array([row.tokens for row in rows], schema().field(0).type),
            pa.array([row.trained for row in rows], schema().field(1).type),
            pa.array([row.more for row in rows], schema().field(2).type),
        ],
        schema=schema(),
    )
    numbers = np.array([int(row.id.rpartition(":")[2]) for row in made.rows], np.int64)
    tokens = [tokens_bytes(row.tokens) for row in rows]
    hashes = [blake2b(each, digest_size=16).digest() for each in tokens]
    contents = (
        blake2b(each + repr((row.trained, row.more)).encode(), digest_size=16).digest()
        for each, row in zip(tokens, rows, strict=True)
    )
    return Part(
        batch.serialize().to_pybytes(),
        numbers.tobytes(),
        b"".join(hashes),
        b"".join(contents),
        Counter(row.tag for row in rows),
        made.tally,
    )


def parts(chunks: Iterable[Chunk], maker: Maker[Any], processes: int) -> Iterator[Part]:
    """Yield the tokenized rows of all chunks, in their order. Chunks after a mistake are only
    searched for others.

    At most three chunks for each process are in memory at a time. The processes end with this
    generator, and with the process that runs it.

    Raises:
        DataError, UnstorableError: as in `encoded_part`, for the first chunk with a mistake.
        WorkerError: a process has ended, such as for want of memory.
        WaitTimeoutError: a chunk took longer than `CHUNK_TIMEOUT_S`.
    """
    tokenizes = True
    if processes == 1:
        for chunk in chunks:
            part = encoded_part(chunk, maker, tokenizes=tokenizes)
            tokenizes = tokenizes and not part.tally.mistakes
            yield part
        return
    waiting: deque[Future[Part]] = deque()
    with _pool(maker, processes) as pool:
        for chunk in chunks:
            waiting.append(pool.submit(_work, chunk, tokenizes))
            if len(waiting) >= 3 * processes:
                part = _result(waiting.popleft())
                tokenizes = tokenizes and not part.tally.mistakes
                yield part
        while waiting:
            yield _result(waiting.popleft())


@contextmanager
def _pool(maker: Maker[Any], processes: int) -> Iterator[ProcessPoolExecutor]:
    """Start processes that tokenize, and end them at once when the caller is done with them."""
    # Forks of this process, which has threads, might hang.
    context = get_context("spawn")
    watched, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        processes, context, initializer=_begin, initargs=(maker, list(sys.path), watched)
    )
    try:
        yield pool
    finally:
        held.close()
        pool.shutdown(wait=True, cancel_futures=True)
        watched.close()


def _result(future: Future[Part]) -> Part:
    """Return the result of a chunk; see `parts` for errors."""
    try:
        return future.result(CHUNK_TIMEOUT_S)
    except BrokenProcessPool:
        raise WorkerError(
            "a process that tokenizes rows has ended, perhaps for want of memory; give the run "
            "more memory or fewer cores (taskset), and start it again"
        ) from None
    except TimeoutError:
        raise WaitTimeoutError(
            f"about a megabyte of rows was not tokenized in {CHUNK_TIMEOUT_S:g} s; does the "
            "function of the source (`fn`), or the chat template, never end?"
        ) from None


_maker: Maker[Any] | None = None
"""Maker of the rows in a process that tokenizes."""


def _begin(maker: Maker[Any], path: list[str], watched: Connection) -> None:
    """Prepare this process, and end it when the other end of `watched` is closed, as it is when
    the process at the other end has died."""
    global _maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    sys.path[:] = path
    _maker = maker
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()


def _end_with(watched: Connection) -> None:
    """Wait until the other end of a pipe is closed, then end this process."""
    try:
        watched.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _work(chunk: Chunk, tokenizes: bool) -> Part:
    """Tokenize a chunk in this process, or look for mistakes in it."""
    assert _maker is not None
    return encoded_part(chunk, _maker, tokenizes=tokenizes)
