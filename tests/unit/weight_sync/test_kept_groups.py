"""Which groups a push takes over, without processes; pushes: tests/contract/test_kept_groups.py."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.transport_choice import new_channel
from roll.weight_sync.transports.kept_groups import Choice, Holds, KeptGroup, KeptGroups, choose

SENDERS = 2
OF_SENDERS = "senders"


class Group:
    """Like a group of NCCL; notes how it was ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def shutdown(self) -> None:
        self.ended.append("shutdown")

    def abort(self) -> None:
        self.ended.append("abort")


def channel_to(receivers: str, *, kept_groups: int = 6, **settings: Any) -> Channel:
    wanted: dict[str, Any] = {"num_senders": SENDERS, "timeout_s": 30.0, **settings}
    channel = new_channel("broadcast", num_receivers=len(receivers), **wanted)
    return replace(channel, receivers=tuple(receivers), kept_groups=kept_groups)


def kept(group_id: str, receivers: str = "", rank: int = 0, **settings: Any) -> KeptGroup:
    """A group of the two senders and the named receivers; without receivers that of the senders."""
    size = SENDERS + len(receivers)
    return KeptGroup(Group(), group_id, "me", rank, channel_to(receivers or "ab", **settings), size)


def hold(*groups: KeptGroup, without: str = "") -> dict[str, Holds]:
    """What each process keeps, by its name, if all but those named have kept all groups."""
    held: dict[str, set[tuple[str, int]]] = {"0": set(), "1": set()}
    for group in groups:
        for rank, name in enumerate(["0", "1", *group.receivers][: group.size]):
            held.setdefault(name, set())
            if name not in without:
                held[name].add((group.id, rank))
    return dict(held)


def chosen(
    receivers: str, *groups: KeptGroup, without: str = "", **settings: Any
) -> tuple[set[str], Choice]:
    """The ids of kept groups that the push takes over, and the whole choice."""
    held = hold(*groups, without=without)
    holds = [held.get(name, set()) for name in ("0", "1", *receivers)]
    choice = choose("me", groups, channel_to(receivers, **settings), holds)
    return {choice.group, choice.senders} - set(choice.made), choice


ALL, SOME, OURS = kept("all", "abc"), kept("some", "ab"), kept(OF_SENDERS)


def test_a_push_takes_over_the_groups_of_its_own_processes() -> None:
    taken, choice = chosen("ab", ALL, SOME, OURS)
    assert taken == {"some", OF_SENDERS}
    assert set(choice.stay) == {"all", "some", OF_SENDERS}
    taken, choice = chosen("ac", ALL, SOME, OURS)
    assert taken == {OF_SENDERS}
    assert len(choice.made) == 1
    assert choice.group not in choice.stay
    assert chosen("abc")[0] == set()


@pytest.mark.parametrize("receivers", ["bac", "ab", "abcd"])
def test_ranks_in_another_order_or_number_are_another_group(receivers: str) -> None:
    assert "all" not in chosen(receivers, ALL)[0]


@pytest.mark.parametrize("settings", [{"collective": "nccl"}, {"timeout_s": 31.0}])
def test_a_group_with_other_limits_or_of_another_library_does_not_do(
    settings: dict[str, Any],
) -> None:
    assert chosen("abc", ALL, OURS, **settings)[0] == set()


def test_a_replaced_engine_ends_its_groups_and_no_other() -> None:
    other = kept("other", "cd")
    taken, choice = chosen("ab", ALL, SOME, other, OURS, without="b")
    assert taken == {OF_SENDERS}
    assert set(choice.stay) == {"other", OF_SENDERS}
    taken, choice = chosen("b", ALL, SOME, other, OURS, without="b")  # its first push, alone
    assert set(choice.stay) == {"other", OF_SENDERS}


def test_an_engine_that_stays_out_of_a_push_may_have_kept_its_groups() -> None:
    assert set(chosen("a", ALL, SOME, OURS)[1].stay) == {"all", "some", OF_SENDERS}


def test_groups_that_another_sender_has_broken_off_are_over() -> None:
    taken, choice = chosen("abc", ALL, SOME, OURS, without="1")
    assert not taken
    assert not choice.stay


def test_without_names_of_places_only_the_members_themselves_count() -> None:
    held = hold(SOME)
    channel = replace(channel_to("ab"), receivers=())
    choice = choose("me", [SOME], channel, [held[name] for name in ("0", "1", "a", "b")])
    assert choice.group == "some"


def test_the_group_whose_last_use_is_longest_ago_makes_room() -> None:
    kinds = [kept(name, name) for name in "abcd"]
    assert set(chosen("e", *kinds, OURS, kept_groups=3)[1].stay) == {"c", "d", OF_SENDERS}
    assert set(chosen("a", *kinds, OURS, kept_groups=3)[1].stay) == {"c", "d", "a", OF_SENDERS}
    assert set(chosen("a", *kinds, OURS, kept_groups=1)[1].stay) == {"a", OF_SENDERS}
    assert chosen("a", *kinds, OURS, kept_groups=0)[1].stay == []


def test_a_process_closes_the_groups_of_one_trainer_without_those_of_another() -> None:
    groups = KeptGroups()
    mine, also_mine = kept("1", "a"), kept("2", "b")
    theirs = replace(kept("3", "a"), leader="another trainer")
    for each in (mine, also_mine, theirs):
        groups.keep(each)
    groups.close("me", but=["2"])
    assert [each.id for each in groups.held()] == ["2", "3"]
    assert [each.group.ended for each in (mine, also_mine, theirs)] == [["shutdown"], [], []]
    assert groups.take("3", 0) is theirs
    with pytest.raises(WeightSyncError, match="no longer has group 3 as rank 0"):
        groups.take("3", 0)
    groups.close()
    assert groups.held() == []
    assert also_mine.group.ended == ["shutdown"]
    assert theirs.group.ended == []  # a push uses it


@pytest.mark.timeout(60)
def test_a_group_that_cannot_be_closed_is_named_and_broken_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NCCL may wait for a process that is gone, or fail."""
    let_go = threading.Event()

    class Stuck(Group):
        def shutdown(self) -> None:
            let_go.wait(50)

    class Failing(Group):
        def shutdown(self) -> None:
            raise RuntimeError("remote process exited\nat line 3")

    groups = KeptGroups(close_s=0.2)
    stuck = [replace(kept(str(i), "ab", rank=i), group=Stuck()) for i in range(3)]
    failing = replace(kept("4", "ab", rank=3), group=Failing())
    for each in (*stuck, failing):
        groups.keep(each)
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING):
        groups.close()
    let_go.set()
    assert time.monotonic() - begun < 10  # they are waited for together
    assert [each.group.ended for each in (*stuck, failing)] == [["abort"]] * 4
    assert caplog.text.count("NCCL has not closed it within 0.2 s") == 3
    assert "rank 1 of 4 (1)" in caplog.text
    assert "rank 3 of 4 (4): remote process exited;" in caplog.text
