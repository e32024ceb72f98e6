"""A manifest travels to each process once, and a push never takes another one for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roll.core.errors import WeightSyncError
from roll.weight_sync.manifest import Manifest, TensorMeta, digest
from roll.weight_sync.transport_choice import new_channel
from roll.weight_sync.transports.board_handshake import ReceiverNotes, SenderNotes


class Notes:
    """A board whose notes are all there already."""

    def __init__(self) -> None:
        self.notes: dict[str, dict[str, Any]] = {"agreed/receiver 0": {"ok": True}}
        self.read_keys: list[str] = []

    def post(self, key: str, note: dict[str, Any]) -> None:
        self.notes[key] = note

    def read(self, key: str, peer: str) -> dict[str, Any]:
        self.read_keys.append(key)
        return self.notes[key]

    def stop(self, reason: str) -> None:
        self.notes["stop"] = {"stop": reason}


def manifest_of(*names: str) -> Manifest:
    return Manifest(tuple(TensorMeta(name, (4, 2), "float32") for name in names))


def received(manifest: Manifest) -> tuple[Manifest, list[str]]:
    """What a receiver takes for the manifest of a push, and what it reads for it."""
    board = Notes()
    SenderNotes(board, new_channel("broadcast", num_receivers=1), manifest, 0, verify=False)
    board.read_keys.clear()
    return ReceiverNotes(board, 0).manifest, board.read_keys


def test_a_manifest_that_was_read_before_is_not_read_again() -> None:
    whole, moving = manifest_of("frozen", "w"), manifest_of("frozen", "w").without(["frozen"])
    for manifest, keys in ((whole, ["offer", "manifest"]), (moving, ["offer", "manifest"])):
        assert received(manifest) == (manifest, keys)
    for manifest in (whole, moving, whole):
        assert received(manifest) == (manifest, ["offer"])
    for other in (manifest_of("x"), manifest_of("y")):  # only the last two are kept
        assert received(other) == (other, ["offer", "manifest"])
    assert received(whole) == (whole, ["offer", "manifest"])


def test_whatever_differs_changes_the_digest() -> None:
    first = replace(manifest_of("a", "b"), cuts=((0, 4, 8), (0, 8, 8)))
    a, b = first.tensors
    others = [
        first,
        replace(first, tensors=(b, a)),
        replace(first, tensors=(replace(a, dtype="int32"), b)),
        replace(first, tensors=(replace(a, shape=(2, 4)), b)),
        replace(first, cuts=((0, 4, 8), (0, 4, 8))),
        replace(first, cuts=()),
        replace(first, unchanged=frozenset({"c"})),
    ]
    assert len({digest(each) for each in others}) == len(others)
    assert digest(replace(first)) == digest(first)


def test_a_sender_with_another_manifest_refuses() -> None:
    board = Notes()
    channel = new_channel("broadcast", num_receivers=1)
    SenderNotes(board, channel, manifest_of("a"), 0, verify=False)
    with pytest.raises(WeightSyncError, match="sender 1 has another manifest"):
        SenderNotes(board, channel, manifest_of("b"), 1, verify=False)
