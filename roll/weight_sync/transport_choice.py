"""Choice of a transport for weights, by where senders and receivers run."""

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
    # A small bucket is still in the last-level cache when it is read: measured 1.5 times as fast
    # as 32 MiB.
    "shared_memory": 4 << 20,
    # Each bucket costs a kernel launch, a round of messages, or the time until a file system has
    # shown a file to another host, so larger buckets are cheaper.
    "files": 32 << 20,
    "cuda_ipc": 32 << 20,
    "broadcast": 32 << 20,
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Place where one process of a transfer runs."""

    node: int
    device: int
    """Number of the device on its node."""
    host: str = "127.0.0.1"
    """Host name or IP address under which other nodes reach this one."""


@dataclass(frozen=True, slots=True)
class Route:
    """Transport of one push, with its settings."""

    kind: TransportKind
    collective: Collective = "gloo"
    """Backend of a broadcast; other kinds ignore it."""
    folder: Path | None = None
    """Folder that all hosts share; only for files."""
    bucket_bytes: int | None = None
    """Largest size of a bucket, in bytes; None: the transport's default."""
    kept_groups: int = 0
    """Number of process groups of a broadcast that stay for later pushes; other kinds ignore it."""


def choose_transport(
    platform: str, senders: Sequence[Endpoint], receivers: Sequence[Endpoint]
) -> Route:
    """Return the cheapest transport that reaches every receiver from every sender.

    Within one host shared memory always works: all senders write into it, and all receivers read it
    in place. CUDA IPC avoids the copy through host memory, but every receiver must see the sender's
    GPU, and this GPU must hold all weights. So CUDA IPC is chosen for one sender with all engines
    on its GPU. Between hosts weights are broadcast: with NCCL if every process has a GPU of its
    own, because NCCL refuses a group in which two processes share one; else with Gloo.

    Args:
        platform: `cpu` or `cuda`, as in `WorkerSpec.platform`.
        senders: place of each sending process; at least one.
        receivers: place of each receiving process.
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
    """Make a new channel for one push.

    Call this in the process of sender 0: a broadcast takes a free port on its host.

    Args:
        bucket_bytes: largest size of a bucket, in bytes; None: the transport's default.
        timeout_s: time limit of each wait for another process of the transfer, in seconds.
        host: name or IP address under which the others reach the host of sender 0; broadcast only.
        folder: folder that all hosts see under this path; files only.

    Raises:
        ConfigError: `kind` is files, but there is no `folder`.
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
