"""`Channel`: the picklable address of one weight transfer, opened on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TransportKind = Literal["shared_memory", "cuda_ipc", "broadcast"]
Collective = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Channel:
    """Where one push of weights goes through; a fresh one for each push (`plan.new_channel`).

    Small enough to travel in a Ray call or, as `dataclasses.asdict`, in an engine's own RPC; the
    tensors travel beside it.
    """

    kind: TransportKind
    address: str
    """Name of the sender's socket on this host, or `host:port` of the collective's rendezvous."""
    num_receivers: int
    """Processes that read: replicas times their ranks."""
    bucket_bytes: int
    """Size of one bucket; at most two exist at once."""
    timeout_s: float
    """For each wait on the other side."""
    collective: Collective = "gloo"
    """Backend of a `broadcast`; its buckets lie on the CPU (gloo) or on the current GPU (nccl)."""
