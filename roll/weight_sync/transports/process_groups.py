"""The process groups of a broadcast, of NCCL or gloo: how ranks join, wait and leave."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore
from torch.distributed import ProcessGroupGloo

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.transports.store_board import (
    PAUSE_S,
    SLICE_S,
    StoreBoard,
    first_line,
    open_store,
)

NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
"""Variable with which PyTorch makes a group of NCCL without a watchdog.

A watchdog ends the whole process when a rank of its group dies or is late. An engine that dies in a
push would end the trainer. Without one, errors of the group are raised where it is waited for."""

BREAK_S = 10.0
"""Time that NCCL gets to break the connections of a group, in seconds."""
CLOSE_S = 10.0
"""Time that NCCL gets to close groups in order, in seconds. In a group that has lost a rank it may
wait for it."""

logger = logging.getLogger(__name__)


def finish_work(work: Any, board: StoreBoard, timeout_s: float) -> None:
    """Wait for `work` and watch the board: a peer that hangs breaks no connection.

    Raises:
        RuntimeError: the collective failed, or has not ended after `timeout_s`.
        WeightSyncError: a process stopped the transfer.
    """
    pause_s, longest_s = PAUSE_S
    look_s = time.monotonic() + SLICE_S
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, longest_s)
        if time.monotonic() > look_s:
            board.raise_if_stopped()
            look_s = time.monotonic() + SLICE_S
        # A collective of gloo has its own time limit; one of NCCL without a watchdog has none.
        if time.monotonic() > deadline:
            raise RuntimeError(f"it has not ended within {timeout_s:g} s")
    _within(BREAK_S, work.wait)  # after an error it breaks the connections


def leave_groups(groups: Sequence[Any]) -> None:
    """Break the connections of groups of NCCL. Until then its kernels wait on the GPU for ranks
    that do not come, and an error's traceback may keep a group alive. Those of gloo end with the
    group.

    An error is ignored: the push has ended, well or not.
    """
    breaking = [_begin(group.abort) for group in groups if not isinstance(group, ProcessGroupGloo)]
    deadline = time.monotonic() + BREAK_S
    for broken in breaking:
        with contextlib.suppress(RuntimeError, TimeoutError):
            broken.result(max(0.0, deadline - time.monotonic()))


def close_groups(groups: Mapping[str, Any], limit_s: float = CLOSE_S) -> None:
    """Close groups in which no collective runs. What is not closed in time is broken off.

    Args:
        groups: name of each group, for the log -> the group.
        limit_s: time limit of all together, in seconds.
    """
    closing = {name: _begin(group.shutdown) for name, group in groups.items()}
    deadline = time.monotonic() + limit_s
    left = []
    for name, closed in closing.items():
        try:
            closed.result(max(0.0, deadline - time.monotonic()))
            continue
        except TimeoutError:
            found = f"NCCL has not closed it within {limit_s:g} s"
        except RuntimeError as error:
            found = first_line(error)
        logger.warning(
            "process group of weight pushes, of which this process is %s: %s; another process of "
            "it may be gone. Its connections are broken off",
            name,
            found,
        )
        left.append(groups[name])
    leave_groups(left)


def _within(limit_s: float, call: Callable[[], Any]) -> None:
    """Make a call that ends soon, unless NCCL hangs: after the death of a rank it may.

    Raises:
        RuntimeError: the call raised it, or has not ended after `limit_s`; then a thread is left
            behind.
    """
    try:
        _begin(call).result(limit_s)
    except TimeoutError:
        raise RuntimeError(f"NCCL has not broken it off within {limit_s:g} s") from None


def _begin(call: Callable[[], Any]) -> Future[Any]:
    """Make a call in a thread, which does not keep the process alive."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            made.set_exception(error)

    threading.Thread(target=run, name="roll-break-group", daemon=True).start()
    return made


@contextmanager
def broken_off(what: str) -> Iterator[None]:
    """Turn a collective's RuntimeError into a WeightSyncError.

    Args:
        what: what broke off, for the message, such as `broadcast of bucket 3`.
    """
    try:
        yield
    except RuntimeError as error:
        raise WeightSyncError(
            f"weight transfer: {what} broke off: {first_line(error)}; another process of the "
            "transfer probably died"
        ) from error


def join_group(channel: Channel, board: StoreBoard, rank: int, size: int, name: str) -> Any:
    """Return the process group once all ranks have joined.

    A thread joins the group, so that this call can watch the board. If a rank never comes, the
    thread is left behind, still waiting.

    Args:
        name: name of the group, by which its ranks find each other.

    Raises:
        WeightSyncError: a rank did not come in time, or a process stopped the transfer.
    """
    made: Future[Any] = Future()
    device = torch.cuda.current_device() if channel.collective == "nccl" else None

    def join() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # it is that of a thread
            made.set_result(_make_group(channel, rank, size, name))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            made.set_exception(error)

    threading.Thread(target=join, name="roll-broadcast-group", daemon=True).start()
    late = (
        f"weight transfer: rank {rank} of {size} could not join the broadcast within "
        f"{channel.timeout_s:g} s"
    )
    deadline = time.monotonic() + channel.timeout_s
    while True:
        try:
            return made.result(SLICE_S)
        except TimeoutError:
            board.raise_if_stopped()
            if time.monotonic() > deadline:  # NCCL itself waits for ever
                raise WeightSyncError(f"{late}: a process of the transfer may hang") from None
        except RuntimeError as error:
            raise WeightSyncError(f"{late}: {first_line(error)}") from error


def _make_group(channel: Channel, rank: int, size: int, name: str) -> Any:
    """Join the transfer's own NCCL or gloo group, apart from torch's default group."""
    timeout = timedelta(seconds=channel.timeout_s)
    # The group gets its own connection to the store: while it waits for the other ranks, reads of
    # the board over the same connection would block.
    prefix = PrefixStore(name, open_store(channel, is_host=False))
    if channel.collective == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        first = allocate(channel, 1).zero_()
        return nccl_group(ProcessGroupNCCL, (prefix, rank, size, options), first)
    return ProcessGroupGloo(prefix, rank, size, timeout)


def nccl_group(kind: Callable[..., Any], given: tuple[Any, ...], first: Tensor) -> Any:
    """Make a group of NCCL without a watchdog, and connect its ranks.

    Args:
        kind: PyTorch's `ProcessGroupNCCL`.
        given: its arguments.
        first: memory on the GPU for the first collective.
    """
    before = os.environ.get(NO_WATCHDOG)
    os.environ[NO_WATCHDOG] = "1"
    try:
        group = kind(*given)  # reads the variable
    finally:
        if before is None:
            del os.environ[NO_WATCHDOG]
        else:
            os.environ[NO_WATCHDOG] = before
    # The first collective connects the ranks, and waits for one that has died without an end. Its
    # end is waited for, because NCCL writes to `first` until then.
    group.broadcast([first], BroadcastOptions()).wait()
    return group


def allocate(channel: Channel, num_bytes: int) -> Tensor:
    """Return uninitialized memory on the CPU, or with NCCL on the current GPU, uint8
    `[num_bytes]`."""
    device = "cuda" if channel.collective == "nccl" else "cpu"
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
