"""`Channel`: the picklable address of one weight transfer, opened on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Channel:
    """Where one push of weights goes through; a fresh one for each push.

    Small enough to travel in a Ray call or an engine's own RPC; the tensors travel beside it.
    """

    kind: Literal["shared_memory", "cuda_ipc", "broadcast"]
    address: str
    """A name under /dev/shm, or `host:port` of the collective's rendezvous."""
    num_receivers: int
    """Processes that read: replicas times their ranks."""
    bucket_bytes: int
    """Size of one bucket; at most two exist at once."""
    timeout_s: float
    """For each wait on the other side."""
