"""The report of one of an engine's processes about a push that it has received."""

from __future__ import annotations

from typing import Any

from roll.weight_sync.transfer import Incoming


def numbers_of(incoming: Incoming) -> dict[str, Any]:
    """Return the fields of a `LoadReport`, all but the version, as plain JSON.

    Args:
        incoming: the push, after its last tensor: the checksum is not known before.
    """
    return {
        "num_tensors": len(incoming.manifest.tensors),
        "num_bytes": incoming.manifest.num_bytes,
        "checksum": incoming.checksum,
        "receive_s": incoming.receive_s,
        "load_s": incoming.load_s,
    }
