"""Computation of nodes, devices and cores from the `cluster` section of a run file.

`roll check` prints the layout; `ResourceManager` applies it. This module imports neither torch nor
Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from roll.config.sections.placement import ClusterConfig, parse_devices
from roll.core.errors import ConfigError
from roll.platform.machine import Machine


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """The nodes and devices of a run. `plan_layout` has checked that the machine has them."""

    platform: str
    """`cpu` or `cuda`."""
    nodes: int
    devices_per_node: int
    pools: Mapping[str, tuple[int, ...]]
    """Name of each pool -> job-wide numbers of its devices. The device with the number d is number
    d % devices_per_node on node d // devices_per_node."""


def address_to_join(cluster: ClusterConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the address of the Ray cluster that the run joins: `cluster.address`, or the variable
    RAY_ADDRESS. Return None if the run starts Ray on this machine."""
    address = cluster.address or environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address


def plan_layout(
    cluster: ClusterConfig, pools: Mapping[str, str], machine: Machine, *, joined: bool
) -> DeviceLayout:
    """Compute the layout, and check that the machine has the devices that the pools name.

    Args:
        pools: name -> device list, such as "0-3".
        machine: this machine, or the smallest node of the Ray cluster that the run joins.
        joined: True if the run joins a Ray cluster, False if it starts Ray on this machine.

    Raises:
        ConfigError: there are no pools, the machine has too few devices, or the run wants several
            nodes without a Ray cluster to join.
    """
    parsed = {name: parse_devices(text) for name, text in pools.items()}
    if not parsed:
        raise ConfigError("pools is empty; name at least one, like pools: {all: '0'}")
    if cluster.nodes > 1 and not joined:
        raise ConfigError(
            f"cluster.nodes is {cluster.nodes} but there is no Ray cluster to join; start one with "
            "`ray start` on every machine and set cluster.address or RAY_ADDRESS"
        )
    platform = cluster.platform
    if platform == "auto":
        platform = "cuda" if machine.gpus else "cpu"
    highest = max(device for devices in parsed.values() for device in devices)
    per_node = _devices_per_node(cluster, platform, highest, machine)
    total = per_node * cluster.nodes
    for name, devices in parsed.items():
        if max(devices) >= total:
            kind = "GPUs" if platform == "cuda" else "CPU slots"
            raise ConfigError(
                f"pools.{name} names device {max(devices)}, but there are {total} {kind} "
                f"({cluster.nodes} node(s) x {per_node}), numbered 0 to {total - 1}; "
                f"use fewer devices or set cluster.devices_per_node or cluster.nodes"
            )
    return DeviceLayout(platform, cluster.nodes, per_node, parsed)


def _devices_per_node(cluster: ClusterConfig, platform: str, highest: int, machine: Machine) -> int:
    """Return the slots per node: by default all GPUs, or as many CPU slots as the pools need.

    Args:
        platform: `cpu` or `cuda`.
        highest: highest number of a device that a pool names.

    Raises:
        ConfigError: a node has too few GPUs or cores.
    """
    asked = cluster.devices_per_node
    if platform == "cuda":
        if machine.gpus == 0:
            raise ConfigError(
                "cluster.platform is cuda but no NVIDIA GPU was found; use platform: cpu or auto, "
                "or check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
            )
        if asked is not None and asked > machine.gpus:
            raise ConfigError(
                f"cluster.devices_per_node is {asked} but a node has {machine.gpus} GPU(s)"
            )
        return asked or machine.gpus
    if asked is not None:
        return asked  # set by the user, so there may be more slots than cores
    needed = ceil((highest + 1) / cluster.nodes)
    if needed > len(machine.cores):
        raise ConfigError(
            f"pools name {needed} CPU slots per node (device {highest} is the highest) but a node "
            f"has {len(machine.cores)} core(s); name fewer, or set cluster.devices_per_node: "
            f"{needed} to let slots share cores"
        )
    return needed


def share_cores(cores: tuple[int, ...], slots: int) -> list[tuple[int, ...]]:
    """Divide `cores` into `slots` contiguous shares of equal size, with at least one core each.
    Cores that are left over are in no share. If there are more slots than cores, slots share cores.

    Args:
        cores: numbers of the cores; at least one.
        slots: number of shares; at least one.

    Example: share_cores((0, 1, 2, 3, 4), 2) == [(0, 1), (2, 3)]
    """
    size = max(1, len(cores) // slots)
    starts = [(slot * size) % len(cores) for slot in range(slots)]
    return [cores[start : start + size] for start in starts]
