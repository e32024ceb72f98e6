"""The process groups that stay from one push of weights to the next.

To connect the ranks of a group takes time: with NCCL seconds, and more of them the more ranks there
are. So the processes of a push keep its groups when it has ended well, and the next push between
the same processes uses them again.

Nobody needs to know which processes are new. For each push, every process tells the leading sender
which groups it keeps, and as which of their ranks. The leader takes a group that all of them keep,
or has a new one made. A process that has replaced another keeps none of its groups, and one in
which a push has failed has broken off those of that push: a failed collective may leave a group
with ranks that wait for each other.

Key            Posted by             Note
holds/<name>   each other process    {holds: [[id, rank] of each group that it keeps]}
groups         leading sender        the `Choice`
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Collection, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.names import LEADER
from roll.weight_sync.transports.process_groups import (
    CLOSE_S,
    close_groups,
    join_group,
    leave_groups,
)
from roll.weight_sync.transports.store_board import StoreBoard

Holds = Set[tuple[str, int]]
"""Groups that a process keeps: id, and rank of the process."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptGroup:
    """A process group as one of its ranks keeps it."""

    group: Any
    """PyTorch's group."""
    id: str
    leader: str
    """Name of the process that leads the pushes through it."""
    rank: int
    channel: Channel
    """Channel of the push for which it was made."""
    size: int
    """Number of ranks: all senders and receivers, or the senders alone."""

    @property
    def receivers(self) -> Sequence[str]:
        """Places of the receivers in it, if they were told; the senders have the first ranks."""
        return self.channel.receivers if self.size > self.channel.num_senders else ()


class KeptGroups:
    """The groups that a process keeps. One that a push uses is not among them meanwhile.

    Args:
        close_s: time limit of closing groups, in seconds.
    """

    def __init__(self, close_s: float = CLOSE_S) -> None:
        self._close_s = close_s
        self._name = (0, "")
        self._lock = threading.Lock()
        self._kept: list[KeptGroup] = []

    @property
    def name(self) -> str:
        """Name of this process, which no other one has: also none that was forked from the same
        server, which has imported this module."""
        with self._lock:
            if self._name[0] != os.getpid():
                self._name = (os.getpid(), secrets.token_hex(8))
            return self._name[1]

    def held(self) -> list[KeptGroup]:
        """Return the groups; the one whose last use is longest ago is first."""
        with self._lock:
            return list(self._kept)

    def keep(self, group: KeptGroup) -> None:
        """Keep a group whose collectives have all ended well."""
        with self._lock:
            self._kept.append(group)

    def take(self, group_id: str, rank: int) -> KeptGroup:
        """Return a group, to be used or closed; it is kept no longer.

        Raises:
            WeightSyncError: it is not kept.
        """
        with self._lock:
            for index, kept in enumerate(self._kept):
                if (kept.id, kept.rank) == (group_id, rank):
                    return self._kept.pop(index)
        raise WeightSyncError(
            f"weight transfer: a process no longer has group {group_id} as rank {rank}: it closed "
            "its groups during a push; push again"
        )

    def close(self, leader: str | None = None, but: Collection[str] = ()) -> None:
        """Close groups, with a limit on the wait.

        Args:
            leader: only those that this process leads; None: all.
            but: ids of those that stay.
        """
        with self._lock:
            leaving = [
                kept for kept in self._kept if leader in (None, kept.leader) and kept.id not in but
            ]
            self._kept = [kept for kept in self._kept if kept not in leaving]
        named = {f"rank {one.rank} of {one.size} ({one.id})": one.group for one in leaving}
        close_groups(named, self._close_s)


KEPT = KeptGroups()
"""The groups of this process. A worker closes them when it ends."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The groups of a push, as its leading sender has chosen them."""

    leader: str
    """Name of the process that leads."""
    group: str
    """Id of the group of all processes."""
    senders: str
    """Id of the group of the senders."""
    made: Sequence[str]
    """Ids of those two that are to be made."""
    stay: Sequence[str]
    """Ids of this leader's groups that are kept during the push; every process closes others."""


def choose(
    leader: str, own: Sequence[KeptGroup], channel: Channel, holds: Sequence[Holds]
) -> Choice:
    """Choose the groups of a push.

    Args:
        own: groups that the leading sender keeps and leads; first that of the oldest use.
        holds: what each rank keeps; rank 0 is the leading sender, then come the other senders, and
            then the receivers.
    """
    size = channel.num_senders + channel.num_receivers
    whole = [kept for kept in own if channel.kept_groups and not _replaced(kept, channel, holds)]
    of_all, of_senders = (
        next((kept.id for kept in reversed(whole) if _fits(kept, ranks, channel, holds)), None)
        for ranks in (size, channel.num_senders)
    )
    others = [kept.id for kept in whole if kept.size > channel.num_senders and kept.id != of_all]
    # The push's own group counts, too.
    stay = others[max(0, len(others) + 1 - channel.kept_groups) :]
    used = [found for found in (of_all, of_senders) if found is not None]
    group, senders = (found or secrets.token_hex(8) for found in (of_all, of_senders))
    needed = [group, senders] if channel.num_senders > 1 else [group]
    return Choice(
        leader, group, senders, [each for each in needed if each not in used], [*stay, *used]
    )


def _fits(kept: KeptGroup, size: int, channel: Channel, holds: Sequence[Holds]) -> bool:
    """Return whether the first `size` ranks of a push are all ranks of a group, in its order, and
    its limits of time are those of the push."""
    return (
        kept.size == size
        and kept.channel.collective == channel.collective
        and kept.channel.timeout_s == channel.timeout_s
        and all((kept.id, rank) in holds[rank] for rank in range(size))
    )


def _replaced(kept: KeptGroup, channel: Channel, holds: Sequence[Holds]) -> bool:
    """Return whether one of the processes of a group, as far as they take part in this push, keeps
    it no longer: it was replaced, or had to break it off."""
    if kept.channel.num_senders != channel.num_senders:
        return True
    places = {place: rank for rank, place in enumerate(channel.receivers, channel.num_senders)}
    now = {rank: rank for rank in range(channel.num_senders)}
    for then, place in enumerate(kept.receivers, channel.num_senders):
        if place in places:
            now[then] = places[place]
    return not all((kept.id, then) in holds[rank] for then, rank in now.items())


class PushGroups:
    """The groups of one push, in one of its processes.

    Call `announce` before this process agrees to the push, `agree` once all have agreed, then
    `enter` for each group; and `end`, whatever happened.
    """

    def __init__(
        self, channel: Channel, board: StoreBoard, name: str, kept: KeptGroups = KEPT
    ) -> None:
        """Prepare; the name is that of this process on the board."""
        self._channel = channel
        self._board = board
        self._name = name
        self._kept = kept
        self._choice: Choice | None = None
        self._entered: list[KeptGroup] = []

    @property
    def made(self) -> int:
        """Number of groups that were made for this push, in all processes together."""
        return 0 if self._choice is None else len(self._choice.made)

    def announce(self) -> None:
        """Tell the leading sender which groups this process keeps."""
        holds = [[kept.id, kept.rank] for kept in self._kept.held()]
        self._board.post(f"holds/{self._name}", {"holds": holds})

    def agree(self, others: Sequence[str] | None = None) -> None:
        """Choose the groups, or wait for the choice; close groups that are of no more use.

        Args:
            others: names of the other processes, in the order of the ranks; in the leading sender
                only.

        Raises:
            WeightSyncError: the errors of the board.
        """
        if others is None:
            self._choice = Choice(**self._board.read("groups", LEADER))
        else:
            leader, held = self._kept.name, self._kept.held()
            own = [kept for kept in held if kept.leader == leader and kept.rank == 0]
            holds = [{(kept.id, kept.rank) for kept in held}]
            for name in others:
                note = self._board.read(f"holds/{name}", name)["holds"]
                holds.append({(group_id, rank) for group_id, rank in note})
            self._choice = choose(leader, own, self._channel, holds)
            self._board.post("groups", asdict(self._choice))
        self._kept.close(self._choice.leader, but=self._choice.stay)

    def enter(self, rank: int, *, of_senders: bool = False) -> Any:
        """Return PyTorch's group of all processes, or that of the senders: the kept one, or a new
        one once all ranks have joined it. Errors are those of `join_group`.

        Args:
            rank: rank of this process in it.
        """
        assert self._choice is not None
        channel, choice = self._channel, self._choice
        group_id = choice.senders if of_senders else choice.group
        if group_id not in choice.made:
            found = self._kept.take(group_id, rank)
        else:
            size = channel.num_senders + (0 if of_senders else channel.num_receivers)
            name = "senders" if of_senders else "group"
            group = join_group(channel, self._board, rank, size, name)
            found = KeptGroup(group, group_id, choice.leader, rank, channel, size)
        self._entered.append(found)
        return found.group

    def end(self, *, whole: bool) -> None:
        """Keep the groups for the next push; or break their connections.

        Args:
            whole: this process has done its part to the end, so nothing is on its way in them.
        """
        entered, self._entered = self._entered, []
        if not (whole and self._channel.kept_groups):
            leave_groups([kept.group for kept in entered])
            return
        for kept in entered:
            self._kept.keep(kept)
