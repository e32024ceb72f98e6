"""`Channel`: the picklable address of one weight transfer, which all its processes open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TransportKind = Literal["shared_memory", "cuda_ipc", "broadcast", "files"]
Collective = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class Channel:
    """Address and settings of one push of weights; `new_channel` makes a new one for each push.

    A channel is small enough for a Ray call or, as `dataclasses.asdict`, for an engine's own RPC.
    It carries no tensors.
    """

    kind: TransportKind
    address: str
    """Name of the leading sender's socket on this host (shared_memory, cuda_ipc), `host:port` of
    the rendezvous (broadcast), or path of a folder (files)."""
    num_receivers: int
    """Number of processes that read: replicas times ranks per replica."""
    bucket_bytes: int
    """Largest size of a bucket, in bytes; at most two buckets exist at once."""
    timeout_s: float
    """Time limit of each wait for another process of the transfer, in seconds."""
    collective: Collective = "gloo"
    """Backend of a `broadcast`. Buckets lie on the CPU (gloo) or on the current GPU (nccl)."""
    num_senders: int = 1
    """Number of processes that write, each its own part of the tensors. Number 0 leads."""
    receivers: tuple[str, ...] = ()
    """Place of each receiver in the run, such as `actor_infer[1].0`, if it is known: a process that
    replaces another has its place."""
    kept_groups: int = 0
    """Number of process groups of a `broadcast` that stay for later pushes; 0: none does."""
