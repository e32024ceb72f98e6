"""Pushes one after another between processes that stay, on gloo: which groups of a broadcast are
made anew, that every byte is right, and that nobody hangs."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.abort import Abort
from roll.weight_sync.channel import Channel
from roll.weight_sync.transfer import receive, send
from roll.weight_sync.transport_choice import new_channel
from roll.weight_sync.transports.kept_groups import KEPT
from tests.contract.test_transport_contract import accept_all, parts_of, refuse_all, shared_out

pytestmark = pytest.mark.timeout(300)

SENDERS = 2
TIMEOUT_S = 600.0
"""Limit of each wait in a push; a test that waits for it fails."""
ANSWER_S = 60.0


@dataclass(frozen=True)
class Part:
    """What one process does in a push."""

    channel: Channel
    index: int
    version: int
    trouble: Path
    """File that an engine makes before it dies or hangs; the driver would be told, and give up."""
    behaviour: str = ""


def weights(version: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(version)
    return {
        "a.large": torch.randn(50, 41, generator=g),
        "a.bf16": torch.randn(7, 3, generator=g).bfloat16(),
        "b.scalar": torch.tensor(float(version)),
        "b.ints": torch.randint(-9, 9, (300,), generator=g),
    }


def raw(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {
        name: tensor.clone().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def send_part(part: Part) -> dict[str, Any]:
    tensors = weights(part.version)
    manifest = shared_out(tensors, SENDERS)
    abort, over = Abort(), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            if part.trouble.exists():
                abort.give_up("an engine is in trouble")

    watching = threading.Thread(target=watch)
    watching.start()
    parts = parts_of(tensors, manifest, part.index)
    try:
        report = send(part.channel, parts, manifest, verify=True, sender=part.index, abort=abort)
    finally:
        over.set()
        watching.join()
    return {"made": report.groups_made, "checksum": report.checksum}


def take_part(part: Part) -> dict[str, Any]:
    check = refuse_all if part.behaviour == "refuse" else accept_all
    with receive(part.channel, part.index, check=check) as incoming:
        got = {}
        for name, tensor in incoming.tensors():
            got[name] = tensor.clone()
            if part.behaviour in ("die", "hang"):
                part.trouble.touch()
            if part.behaviour == "die":
                os._exit(9)
            if part.behaviour == "hang":
                time.sleep(100)
            if part.behaviour == "raise":
                raise WeightSyncError("the engine has no memory")
    return {"got": raw(got), "checksum": incoming.checksum}


def member(pipe: Connection, sends: bool) -> None:
    """A process that takes its part in one push after another; "close" is the end of a run."""
    while (part := pipe.recv()) is not None:
        answer: dict[str, Any] = {"error": None}
        begun = time.monotonic()
        try:
            if part == "close":
                KEPT.close()
            else:
                answer |= send_part(part) if sends else take_part(part)
        except WeightSyncError as error:
            answer["error"] = str(error)
        answer["took_s"] = time.monotonic() - begun
        answer["held"] = sorted((kept.size, kept.rank, kept.id) for kept in KEPT.held())
        answer["sockets"] = sockets()
        answer["threads"] = [thread.name for thread in threading.enumerate()]
        pipe.send(answer)


def sockets() -> int:
    """Open sockets of this process."""
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder itself
            found += os.readlink(entry.path).startswith("socket:")
    return found


class Member:
    def __init__(self, *, sends: bool = False) -> None:
        context = mp.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=member, args=(theirs, sends))
        self.process.start()
        theirs.close()

    def answer(self) -> dict[str, Any]:
        assert self.pipe.poll(ANSWER_S), "a process hangs"
        try:
            found: dict[str, Any] = self.pipe.recv()
        except EOFError:
            return {"error": "died", "held": []}
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Team:
    """A trainer of two ranks, and engines of one process each, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.senders = [Member(sends=True) for _ in range(SENDERS)]
        self.engines = {name: Member() for name in "abc"}
        self.version = 0

    def replace(self, name: str) -> None:
        self.engines[name].end()
        self.engines[name] = Member()

    def push(
        self,
        names: Sequence[str],
        *,
        kept_groups: int = 6,
        **behaviours: str,
    ) -> dict[str | int, dict[str, Any]]:
        """Push new weights to some engines; return what each process answers."""
        self.version += 1
        channel = new_channel(
            "broadcast",
            num_receivers=len(names),
            num_senders=SENDERS,
            bucket_bytes=2048,
            timeout_s=TIMEOUT_S,
        )
        channel = replace(channel, receivers=tuple(names), kept_groups=kept_groups)
        trouble = self.folder / str(self.version)
        for index, sender in enumerate(self.senders):
            sender.pipe.send(Part(channel, index, self.version, trouble))
        for index, name in enumerate(names):
            part = Part(channel, index, self.version, trouble, behaviours.get(name, ""))
            self.engines[name].pipe.send(part)
        answers: dict[str | int, dict[str, Any]] = {
            index: sender.answer() for index, sender in enumerate(self.senders)
        }
        answers |= {
            name: self.engines[name].answer() for name in names if behaviours.get(name) != "hang"
        }
        return answers

    def push_right(self, names: Sequence[str], **settings: Any) -> dict[str | int, dict[str, Any]]:
        """Do what `push` does; every byte arrives."""
        answers = self.push(names, **settings)
        assert [answer["error"] for answer in answers.values()] == [None] * len(answers)
        expected = raw(weights(self.version))
        for name in names:
            assert answers[name]["got"] == expected
            assert answers[name]["checksum"] == answers[0]["checksum"] is not None
        return answers

    def close(self) -> None:
        for each in [*self.senders, *self.engines.values()]:
            each.end()


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    team = Team(tmp_path)
    try:
        yield team
    finally:
        team.close()


def ids(answer: Mapping[str, Any]) -> dict[int, set[str]]:
    """Ids of the groups that a process keeps, by their number of ranks."""
    found: dict[int, set[str]] = {}
    for size, _, group_id in answer["held"]:
        found.setdefault(size, set()).add(group_id)
    return found


def test_only_the_first_push_between_the_same_processes_makes_groups(team: Team) -> None:
    pushes = [team.push_right("abc") for _ in range(3)]
    assert [push[0]["made"] for push in pushes] == [2, 0, 0]  # of all, and of the senders
    for who in (0, 1, *"abc"):
        assert pushes[0][who]["held"] == pushes[2][who]["held"]
        assert pushes[1][who]["sockets"] == pushes[2][who]["sockets"]
    (of_all,) = ids(pushes[2]["a"])[5]
    assert ids(pushes[2][1]) == {5: {of_all}, 2: ids(pushes[2][0])[2]}


def test_a_replaced_engine_costs_exactly_the_groups_that_it_was_in(team: Team) -> None:
    first, other = team.push_right("ab"), team.push_right("c")
    assert (first[0]["made"], other[0]["made"]) == (2, 1)
    team.replace("b")
    alone = team.push_right("b")  # as a restarted replica gets its weights
    assert alone[0]["made"] == 1
    both = team.push_right("ab")
    assert both[0]["made"] == 1
    assert team.push_right("c")[0]["made"] == 0
    assert [push[0]["made"] for push in (team.push_right("ab"), team.push_right("b"))] == [0, 0]
    (old,), (new,) = (ids(push["a"])[4] for push in (first, both))
    assert old != new
    for sender in (0, 1):  # and the senders' own group has stayed
        assert old not in ids(both[sender])[4]
        assert ids(both[sender])[2] == ids(first[sender])[2]


def test_other_engines_in_other_places_of_a_group_are_other_members(team: Team) -> None:
    assert team.push_right("ab")[0]["made"] == 2
    assert team.push_right("ba")[0]["made"] == 1
    assert team.push_right("ac")[0]["made"] == 1
    assert [team.push_right(names)[0]["made"] for names in ("ab", "ba", "ac")] == [0, 0, 0]


@pytest.mark.parametrize("behaviour", ["die", "raise", "hang"])
def test_after_a_push_that_broke_its_groups_are_never_used_again(
    team: Team, behaviour: str
) -> None:
    first, other = team.push_right("ab"), team.push_right("c")
    broken = team.push("ab", b=behaviour)
    for who in (0, 1, "a"):
        assert broken[who]["error"] is not None
        assert broken[who]["took_s"] < 30
    assert ids(broken[0]) == {3: ids(other[0])[3]}  # what the push did not use
    if behaviour != "raise":
        team.replace("b")
    again = team.push_right("ab")
    assert again[0]["made"] == 2
    old = {each[2] for each in first[0]["held"]}
    for who in (0, 1, *"ab"):
        assert not old & {each[2] for each in again[who]["held"]}
    assert team.push_right("ab")[0]["made"] == 0
    assert team.push_right("c")[0]["made"] == 0  # a group that was not in the push is whole


def test_a_push_that_is_refused_uses_no_group_and_spoils_none(team: Team) -> None:
    first = team.push_right("ab")
    refused = team.push("ab", b="refuse")
    assert "this model has no such tensors" in refused[0]["error"]
    assert refused[0]["held"] == first[0]["held"]
    assert team.push_right("ab")[0]["made"] == 0


def test_two_trainers_keep_their_own_groups_to_the_same_engine(team: Team) -> None:
    second = Team(team.folder)
    try:
        second.engines["a"].end()
        second.engines["a"] = team.engines["a"]
        second.version = 100
        pushes = [each.push_right("a") for _ in range(2) for each in (team, second)]
        assert [push[0]["made"] for push in pushes] == [2, 2, 0, 0]
        assert len(ids(pushes[-1]["a"])[3]) == 2
    finally:
        second.close()


def test_as_many_groups_are_kept_as_the_channel_says(team: Team) -> None:
    """Besides that of the senders. The one whose last use is longest ago is closed."""
    made = []
    for names in ("a", "b", "a", "c", "a", "b"):
        push = team.push_right(names, kept_groups=2)
        made.append(push[0]["made"])
        assert len(ids(push[0]).get(3, ())) <= 2
        assert ids(push[0])[3] == ids(push[1])[3]
    assert made == [2, 1, 0, 1, 0, 1]
    # What an engine keeps of groups that were closed without it ends with its next push.
    assert ids(team.push_right("c", kept_groups=2)["c"]).keys() == {3}
    nothing = team.push_right("ab", kept_groups=0)
    assert nothing[0]["made"] == 2
    assert all(answer["held"] == [] for answer in nothing.values())


def test_the_end_of_a_run_leaves_neither_connections_nor_threads_nor_processes(team: Team) -> None:
    everybody = [*team.senders, *team.engines.values()]
    before = []
    for each in everybody:
        each.pipe.send("close")
        before.append(each.answer())
    team.push_right("abc")
    team.push_right("ab")
    team.push_right("abc")
    for each, was in zip(everybody, before, strict=True):
        each.pipe.send("close")
        answer = each.answer()
        assert answer["held"] == []
        assert answer["took_s"] < 5
        assert answer["sockets"] == was["sockets"]
        assert answer["threads"] == was["threads"]
    team.push_right("abc")  # whoever does not close its groups ends, too
    for each in everybody:
        each.pipe.send(None)
    for each in everybody:
        each.process.join(20)
        assert each.process.exitcode == 0
