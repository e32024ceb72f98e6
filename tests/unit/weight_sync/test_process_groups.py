"""A group of NCCL must not end the process, nor wait for ever. On GPUs: tests/gpu."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.transport_choice import new_channel
from roll.weight_sync.transports import process_groups
from roll.weight_sync.transports.process_groups import (
    NO_WATCHDOG,
    finish_work,
    join_group,
    leave_groups,
    nccl_group,
)
from roll.weight_sync.transports.store_board import StoreBoard


class Work:
    """A collective that has ended, or one that never does."""

    def __init__(self, *, ended: bool) -> None:
        self.ended = ended
        self.waited = 0

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.waited += 1


class Group:
    """Like PyTorch's group of NCCL: it reads the variable when it is made, and can be aborted."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.watched = os.environ.get(NO_WATCHDOG) != "1"
        self.first = Work(ended=True)
        self.aborted = 0

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        assert options.rootRank == 0
        return self.first

    def abort(self) -> None:
        self.aborted += 1
        raise RuntimeError("no answer of NCCL")


@pytest.fixture
def board() -> StoreBoard:
    channel = new_channel("broadcast", num_receivers=1, timeout_s=5)
    return StoreBoard(channel, "sender 0", is_host=True)


@pytest.mark.parametrize("before", [None, "0"])
def test_a_group_of_nccl_has_no_watchdog_and_other_groups_keep_theirs(before: str | None) -> None:
    assert NO_WATCHDOG not in os.environ
    try:
        if before is not None:
            os.environ[NO_WATCHDOG] = before
        group = nccl_group(Group, ("store", 1, 2), torch.zeros(1, dtype=torch.uint8))
        assert os.environ.get(NO_WATCHDOG) == before
    finally:
        os.environ.pop(NO_WATCHDOG, None)
    assert not group.watched
    assert group.given == ("store", 1, 2)
    assert group.first.waited == 1


def test_a_group_that_cannot_be_made_leaves_the_environment_as_it_was() -> None:
    def broken(*given: Any) -> None:
        raise RuntimeError("no GPU")

    with pytest.raises(RuntimeError, match="no GPU"):
        nccl_group(broken, (), torch.zeros(1))
    assert NO_WATCHDOG not in os.environ


@pytest.mark.timeout(60)
def test_a_collective_that_never_ends_is_given_up(board: StoreBoard) -> None:
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not ended within 0\.3 s"):
        finish_work(Work(ended=False), board, 0.3)
    assert time.monotonic() - begun < 10
    over = Work(ended=True)
    finish_work(over, board, 0.0)
    assert over.waited == 1


@pytest.mark.timeout(60)
def test_a_collective_is_given_up_when_another_process_stops(board: StoreBoard) -> None:
    board.stop("receiver 0: no memory")
    with pytest.raises(WeightSyncError, match="no memory"):
        finish_work(Work(ended=False), board, 30)


def test_a_group_of_nccl_is_left_at_once_and_for_good() -> None:
    group = Group()
    leave_groups([group])
    assert group.aborted == 1


@pytest.mark.timeout(60)
def test_a_group_of_nccl_that_cannot_be_left_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_go = threading.Event()

    class Stuck(Group):
        def abort(self) -> None:
            let_go.wait(50)

    monkeypatch.setattr(process_groups, "BREAK_S", 0.1)
    begun = time.monotonic()
    leave_groups([Stuck(), Stuck()])
    let_go.set()
    assert time.monotonic() - begun < 10


@pytest.mark.timeout(60)
def test_a_failed_collective_that_cannot_be_broken_off_is_an_error(
    board: StoreBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()

    class Stuck(Work):
        def wait(self) -> None:
            let_go.wait(50)

    class Failed(Work):
        def wait(self) -> None:
            raise RuntimeError("remote process exited")

    with pytest.raises(RuntimeError, match="remote process exited"):
        finish_work(Failed(ended=True), board, 30)
    monkeypatch.setattr(process_groups, "BREAK_S", 0.1)
    with pytest.raises(RuntimeError, match=r"within 0\.1 s"):
        finish_work(Stuck(ended=True), board, 30)
    let_go.set()


@pytest.mark.timeout(60)
def test_a_rank_that_never_joins_is_not_waited_for_for_ever(
    board: StoreBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL has no time limit for it."""
    let_go = threading.Event()
    monkeypatch.setattr(process_groups, "_make_group", lambda *given: let_go.wait(50))
    channel = new_channel("broadcast", num_receivers=1, timeout_s=0.5)
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not join .* within 0\.5 s"):
        join_group(channel, board, 0, 2, "group")
    let_go.set()
