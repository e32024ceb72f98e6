"""Messages between the ends of a transfer: any number of them may come in at one read."""

from __future__ import annotations

import os
import socket
import threading

from roll.weight_sync.link import Link


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
