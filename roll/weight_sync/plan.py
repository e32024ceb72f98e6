"""Which way weights travel, decided from where sender and receivers stand."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from roll.platform.machine import free_port
from roll.weight_sync.channel import Channel, Collective, TransportKind


@dataclass(frozen=True, slots=True)
class Place:
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


def choose_transport(platform: str, sender: Place, receivers: Sequence[Place]) -> Route:
    """The cheapest way that reaches every receiver.

    Within one host shared memory always works. CUDA IPC saves the trip through host memory, but
    needs the sender's GPU to be visible to every receiver. There is one sender, the trainer's
    leader, so with several GPUs at most one receiver shares its device, and shared memory carries
    the weights also where trainer and engines are colocated. NCCL refuses a group in which two
    processes have the same GPU.

    Args:
        platform: `cpu` or `cuda`, as in `WorkerSpec.platform`.
    """
    if any(place.node != sender.node for place in receivers):
        gpus = {(place.node, place.device) for place in (sender, *receivers)}
        nccl = platform == "cuda" and len(gpus) == len(receivers) + 1
        return Route("broadcast", "nccl" if nccl else "gloo")
    if platform == "cuda" and all(place == sender for place in receivers):
        return Route("cuda_ipc")
    return Route("shared_memory")


def new_channel(
    kind: TransportKind,
    *,
    num_receivers: int,
    bucket_bytes: int = 256 << 20,
    timeout_s: float = 300.0,
    host: str = "127.0.0.1",
    collective: Collective = "gloo",
) -> Channel:
    """A fresh channel for one push. To be called by the sender: a broadcast takes a port there.

    Args:
        host: name or number under which receivers reach the sender's host; broadcast only.
    """
    if kind == "broadcast":
        address = f"{host}:{free_port()}"
    else:
        address = f"roll-weights-{os.getpid()}-{secrets.token_hex(8)}"
    return Channel(kind, address, num_receivers, bucket_bytes, timeout_s, collective)
