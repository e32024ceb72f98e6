"""Messages between the ends of a transfer: any number of them may come in at one read."""

from __future__ import annotations

import os
import socket
import threading
import uuid

import pytest

from roll.core.errors import WeightSyncError
from roll.weight_sync.abort import Abort
from roll.weight_sync.transports.socket_link import Link, Listener, connect


def test_messages_that_come_together_are_read_one_by_one_and_a_long_one_whole() -> None:
    mine, theirs = socket.socketpair()
    left, right = Link(mine, "right", 10.0), Link(theirs, "left", 10.0)
    long = {"names": ["x" * 50] * 3000}  # more than one read
    reader, writer = os.pipe()
    try:
        sending = threading.Thread(target=send, args=(left, long, writer))
        sending.start()
        message, fds = right.get("offer", max_fds=1)
        assert message == long
        os.write(fds[0], b"same pipe")
        assert os.read(reader, 9) == b"same pipe"
        sending.join(10.0)
        assert right.get("go") == ({"go": True}, [])
        assert right.get("bucket") == ({"bucket": 0}, [])
        os.close(fds[0])
    finally:
        os.close(reader)
        os.close(writer)
        left.close()
        right.close()


def send(link: Link, long: dict[str, list[str]], fd: int) -> None:
    link.put(long, fds=(fd,))
    link.put({"go": True})
    link.put({"bucket": 0})


def test_processes_of_other_users_are_neither_listened_nor_spoken_to() -> None:
    address, other = f"roll-test-{uuid.uuid4().hex}", os.getuid() + 1
    with Listener(address, 10.0, Abort()) as listener:
        with pytest.raises(WeightSyncError, match=f"user {os.getuid()} listens at {address}"):
            connect(address, "receiver 0", 10.0, user=other)
        link = connect(address, "receiver 0", 10.0)
        # The one that hung up has said no name; who comes next is told apart from it.
        with pytest.raises(WeightSyncError, match="connection closed"):
            listener.accept_all(["receiver 0"])
        link.close()
    with Listener(address + "2", 0.3, Abort(), user=other) as listener:
        link = connect(address + "2", "receiver 0", 10.0)
        with pytest.raises(WeightSyncError, match="receiver 0 did not connect within"):
            listener.accept_all(["receiver 0"])
        with pytest.raises(WeightSyncError, match="its process probably died"):
            link.get("offer")
        link.close()


class GivesUpWhenOneHasCome(Listener):
    """The transfer is given up while somebody connects, before who it is has been read."""

    def _accept(self, deadline: float, missing: list[str]) -> Link:
        link = super()._accept(deadline, missing)
        if len(missing) == 1:
            self._abort.give_up("the trainer died")
        return link


@pytest.mark.parametrize("names_itself", [True, False])
def test_who_connects_while_a_transfer_is_given_up_is_told_so_like_the_others(
    names_itself: bool,
) -> None:
    address, names = f"roll-test-{uuid.uuid4().hex}", ["receiver 0", "receiver 1"]
    with GivesUpWhenOneHasCome(address, 20.0, Abort()) as listener:
        first = connect(address, names[0], 20.0)
        if names_itself:
            second = connect(address, names[1], 20.0)
        else:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(b"\0" + address.encode())
            second = Link(connection, "the sender", 20.0)
        with pytest.raises(WeightSyncError, match="given up: the trainer died"):
            listener.accept_all(names)
        if not names_itself:
            second.put({"name": names[1]})
        for link in (first, second, connect(address, "receiver 2", 20.0)):
            assert link.get("offer") == ({"stop": "the trainer died"}, [])
            with pytest.raises(WeightSyncError, match="its process probably died"):
                link.get("offer")
            link.close()


def test_one_that_is_not_expected_is_told_so() -> None:
    address = f"roll-test-{uuid.uuid4().hex}"
    with Listener(address, 20.0, Abort()) as listener:
        link = connect(address, "a stranger", 20.0)
        with pytest.raises(WeightSyncError, match="a stranger is not expected"):
            listener.accept_all(["receiver 0"])
        assert "a stranger is not expected" in link.get("offer")[0]["stop"]
        link.close()
