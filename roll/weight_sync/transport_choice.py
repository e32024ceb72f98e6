"""Which way weights travel, decided from where senders and receivers stand."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from roll.core.errors import ConfigError
from roll.platform.machine import free_port
from roll.weight_sync.channel import Channel, Collective, TransportKind
from roll.weight_sync.transports.files import FOLDER_PREFIX

DEFAULT_BUCKET_BYTES: Mapping[TransportKind, int] = {
    # Still in the last cache when it is read: measured 1.5 times as fast as 32 MiB.
    "shared_memory": 4 << 20,
    "files": 4 << 20,
    # Each bucket costs a launch or a round of messages.
    "cuda_ipc": 32 << 20,
    "broadcast": 32 << 20,
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one process of a transfer runs."""

    node: int
    device: int
    """Device number on its node."""
    host: str = "127.0.0.1"
    """Name or number under which other nodes reach this one."""


@dataclass(frozen=True, slots=True)
class Route:
    """How one push goes."""

    kind: TransportKind
    collective: Collective = "gloo"
    """Of a broadcast."""
    folder: Path | None = None
    """For files."""
    bucket_bytes: int | None = None
    """The transport's default by default."""


def choose_transport(
    platform: str, senders: Sequence[Endpoint], receivers: Sequence[Endpoint]
) -> Route:
    """The cheapest way that reaches every receiver from every sender.

    Within one host shared memory always works: all senders write into it, all receivers read it in
    place. CUDA IPC saves the trip through host memory, but needs the sender's GPU to be visible to
    every receiver, and all of the weights on it: it is for one sender and engines on its GPU. NCCL
    refuses a group in which two processes have the same GPU.

    Args:
        platform: `cpu` or `cuda`, as in `WorkerSpec.platform`.
    """
    everybody = [*senders, *receivers]
    if any(place.node != senders[0].node for place in everybody):
        gpus = {(place.node, place.device) for place in everybody}
        nccl = platform == "cuda" and len(gpus) == len(everybody)
        return Route("broadcast", "nccl" if nccl else "gloo")
    if platform == "cuda" and len(senders) == 1 and all(p == senders[0] for p in receivers):
        return Route("cuda_ipc")
    return Route("shared_memory")


def new_channel(
    kind: TransportKind,
    *,
    num_receivers: int,
    num_senders: int = 1,
    bucket_bytes: int | None = None,
    timeout_s: float = 300.0,
    host: str = "127.0.0.1",
    collective: Collective = "gloo",
    folder: Path | None = None,
) -> Channel:
    """A fresh channel for one push. To be called by sender 0: a broadcast takes a port there.

    Args:
        bucket_bytes: that travel at once; the transport's default by default.
        host: name or number under which the others reach that sender's host; broadcast only.
        folder: that all hosts see under this path; files only.
    """
    token = f"{os.getpid()}-{secrets.token_hex(8)}"
    if kind == "broadcast":
        address = f"{host}:{free_port()}"
    elif kind == "files":
        if folder is None:
            raise ConfigError("weights travel through files, but no folder is named for them")
        address = str(folder.absolute() / f"{FOLDER_PREFIX}{token}")
    else:
        address = f"roll-weights-{token}"
    size = DEFAULT_BUCKET_BYTES[kind] if bucket_bytes is None else bucket_bytes
    return Channel(kind, address, num_receivers, size, timeout_s, collective, num_senders)
