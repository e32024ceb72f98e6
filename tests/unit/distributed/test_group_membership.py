"""The default process group lives as long as somebody in the process uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from roll.config.sections.roles import Role
from roll.core.types import WorkerSpec
from roll.platform.base import join_group, leave_group
from roll.platform.machine import free_port
from roll.strategy.training.group import GroupMembership


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    leave_group()


def spec() -> WorkerSpec:
    return WorkerSpec(Role.ACTOR_TRAIN, 0, 1, (0,), (0,), 0, f"127.0.0.1:{free_port()}", 0, "cpu")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_last_to_leave_dissolves_the_group(order: tuple[int, ...]) -> None:
    members = [GroupMembership(spec()) for _ in range(3)]
    for place, i in enumerate(order):
        dist.all_reduce(torch.ones(1))
        members[i].leave()
        members[i].leave()  # a second time is no other member's leave
        assert dist.is_initialized() == (place < 2)


def test_a_group_that_was_joined_elsewhere_stays() -> None:
    join_group("gloo", spec(), timeout_s=60)
    member = GroupMembership(spec())
    member.leave()
    dist.all_reduce(torch.ones(1))


def test_a_member_of_a_group_that_is_gone_does_not_dissolve_the_next() -> None:
    late = GroupMembership(spec())
    leave_group()
    member = GroupMembership(spec())
    late.leave()
    assert dist.is_initialized()
    member.leave()
    assert not dist.is_initialized()
