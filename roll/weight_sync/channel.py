"""`Channel`: the picklable address of one weight transfer, opened on all sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TransportKind = Literal["shared_memory", "cuda_ipc", "broadcast", "files"]
Collective = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Channel:
    """Where one push of weights goes through; a fresh one for each push (`plan.new_channel`).

    Small enough to travel in a Ray call or, as `dataclasses.asdict`, in an engine's own RPC; the
    tensors travel beside it.
    """

    kind: TransportKind
    address: str
    """Name of the leading sender's socket on this host, `host:port` of the collective's
    rendezvous, or a folder."""
    num_receivers: int
    """Processes that read: replicas times their ranks."""
    bucket_bytes: int
    """Size of one bucket; at most two exist at once."""
    timeout_s: float
    """For each wait on another process of the transfer."""
    collective: Collective = "gloo"
    """Backend of a `broadcast`; its buckets lie on the CPU (gloo) or on the current GPU (nccl)."""
    num_senders: int = 1
    """Processes that write, each its own part of the tensors; number 0 leads."""
