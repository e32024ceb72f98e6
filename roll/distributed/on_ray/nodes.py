"""Numbering of Ray's nodes as nodes of the job, and reservation of their devices.

Ray guarantees no order of nodes, and not that bundle i of a placement group is device i. So nodes
are sorted, each placement group is bound to one node, and a task in each bundle reports its device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll.core.errors import ConfigError, WaitTimeoutError
from roll.distributed.device_layout import DeviceLayout, share_cores
from roll.distributed.on_ray.actor import JobDevice
from roll.platform.machine import cores

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the Ray cluster: a machine, with its numbers of CPUs and GPUs."""

    id: str
    address: str
    cpus: int
    gpus: int


def wait_for_nodes(
    count: int, timeout_s: float, *, platform: str = "cpu", per_node: int | None = None
) -> list[Node]:
    """Wait until at least `count` nodes are alive that have the devices; return all nodes, the
    driver's node first.

    Args:
        platform, per_node: see `with_devices`.

    Raises:
        WaitTimeoutError: after `timeout_s` there are fewer nodes.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        nodes = _alive_nodes()
        missing = count - len(with_devices(nodes, platform, per_node))
        if missing <= 0:
            return nodes
        if time.monotonic() > deadline:
            gpus = platform == "cuda" or any(node.gpus for node in nodes)
            there = ", ".join(f"{n.address} ({n.gpus} GPUs)" if gpus else n.address for n in nodes)
            wanted = f" with {per_node or 1} GPUs" if gpus and platform != "cpu" else ""
            raise WaitTimeoutError(
                f"waited {timeout_s:g} s for {count} Ray nodes{wanted} (cluster.nodes), {missing} "
                f"still missing; there are: {there or 'none'}. "
                "Run `ray start --address=...` on the others"
            )
        time.sleep(POLL_S)


def with_devices(nodes: Sequence[Node], platform: str, per_node: int | None) -> list[Node]:
    """Return the nodes that have the devices of a run; without GPUs all.

    Args:
        platform: `cluster.platform`; `auto`: on GPUs if any node has one.
        per_node: number of GPUs that a node must have; None: one.
    """
    gpus = platform == "cuda" or (platform == "auto" and any(node.gpus for node in nodes))
    return [node for node in nodes if not gpus or node.gpus >= (per_node or 1)]


def _alive_nodes() -> list[Node]:
    """Return Ray's living nodes: the node of this process first, the others by address."""
    here = ray.get_runtime_context().get_node_id()
    nodes = [
        Node(
            id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            cpus=int(entry["Resources"].get("CPU", 0)),
            gpus=int(entry["Resources"].get("GPU", 0)),
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.id != here, node.address, node.id))


def usable_nodes(nodes: Sequence[Node], layout: DeviceLayout) -> list[Node]:
    """Return the first `layout.nodes` nodes that have enough GPUs; without GPUs, simply the first.

    Raises:
        ConfigError: too few nodes have enough GPUs.
    """
    fit = with_devices(nodes, layout.platform, layout.devices_per_node)
    if len(fit) < layout.nodes:
        have = ", ".join(f"{node.address}: {node.gpus}" for node in nodes)
        raise ConfigError(
            f"{layout.nodes} node(s) with {layout.devices_per_node} GPUs are needed; "
            f"GPUs per node: {have}"
        )
    return fit[: layout.nodes]


def claim_devices(
    nodes: Sequence[Node], layout: DeviceLayout, timeout_s: float, undo: ExitStack
) -> dict[int, JobDevice]:
    """Reserve all devices of the layout, with one placement group per node.

    Args:
        timeout_s: time limit of the reservation, and of finding out the devices, in seconds.
        undo: receives the callbacks that release the devices.

    Returns:
        Job-wide number of each device -> the device.

    Raises:
        WaitTimeoutError: another job holds some of the devices.
    """
    groups = []
    for node in nodes[: layout.nodes]:
        group = placement_group(
            [_bundle(node, layout)] * layout.devices_per_node,
            strategy="STRICT_PACK",
            bundle_label_selector=[{"ray.io/node-id": node.id}] * layout.devices_per_node,
        )
        undo.callback(remove_placement_group, group)
        groups.append(group)
    waiting = {group.ready(): node for group, node in zip(groups, nodes, strict=False)}
    missing = ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout_s)[1]
    if missing:
        where = ", ".join(waiting[ref].address for ref in missing)
        raise WaitTimeoutError(
            f"waited {timeout_s:g} s for {layout.devices_per_node} device(s) on {where}: another "
            f"job holds them (free in the whole cluster: {_num_free(layout)})"
        )
    slots: dict[int, JobDevice] = {}
    for index, (node, group) in enumerate(zip(nodes, groups, strict=False)):
        first = index * layout.devices_per_node
        for slot in _node_slots(index, first, node, group, layout, timeout_s):
            slots[slot.number] = slot
    return slots


def _bundle(node: Node, layout: DeviceLayout) -> dict[str, float]:
    """Return the resources of Ray, name -> amount, that one device of the node reserves."""
    if layout.platform == "cuda":
        return {"GPU": 1.0}
    # All slots together reserve all CPUs of Ray, rounded down to 1/10000, Ray's smallest unit.
    return {"CPU": int(node.cpus / layout.devices_per_node * 10_000) / 10_000}


def _num_free(layout: DeviceLayout) -> str:
    """Return number and kind of Ray's free devices, such as `2 GPU`."""
    kind = "GPU" if layout.platform == "cuda" else "CPU"
    return f"{ray.available_resources().get(kind, 0):g} {kind}"


def _node_slots(
    index: int,
    first: int,
    node: Node,
    group: PlacementGroup,
    layout: DeviceLayout,
    timeout_s: float,
) -> list[JobDevice]:
    """Return the devices of one node, numbered from `first` on, each with a share of the node's
    cores. The errors are those of `_probe`.

    Args:
        index: number of the node in the job.
        first: job-wide number of its first device.
        group: placement group with a bundle for each of its devices.
        timeout_s: time limit of finding out the devices, in seconds.
    """
    count = layout.devices_per_node
    local = node.id == ray.get_runtime_context().get_node_id()
    if layout.platform == "cpu":
        own = cores() if local else _probe(group, [0], 0, timeout_s)[0][1]
        devices = [(slot, str(slot), slot) for slot in range(count)]
    else:
        probed = _probe(group, range(count), 1, timeout_s)
        own = probed[0][1]
        devices = numbered([name for name, _ in probed])
    shares = share_cores(own, count)
    return [
        JobDevice(first + place, index, device, name, shares[place], group, bundle)
        for place, (device, name, bundle) in enumerate(devices)
    ]


def numbered(names: Sequence[str]) -> list[tuple[int, str, int]]:
    """Return number on the node, name and bundle of each GPU, in the order of the numbers.

    Args:
        names: name of the GPU of each bundle, as CUDA_VISIBLE_DEVICES of the node names it: a
            number; or the UUID of a GPU or a MIG slice, which gets a number in the order of the
            UUIDs.
    """
    if all(name.isdecimal() for name in names):
        return sorted((int(name), name, bundle) for bundle, name in enumerate(names))
    ordered = sorted((name, bundle) for bundle, name in enumerate(names))
    return [(number, name, bundle) for number, (name, bundle) in enumerate(ordered)]


def _probe(
    group: PlacementGroup, bundles: Sequence[int], gpus: int, timeout_s: float
) -> list[tuple[str, tuple[int, ...]]]:
    """Return, for each bundle, the name of its GPU (empty without `gpus`) and the CPU cores of its
    node, which a task in the bundle reports.

    Args:
        gpus: number of GPUs of each bundle, 0 or 1.

    Raises:
        WaitTimeoutError: a task has not reported within `timeout_s`.
    """
    refs = [
        ray.remote(_look_around)
        .options(
            num_cpus=0,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
        )
        .remote()
        for bundle in bundles
    ]
    missing = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[1]
    if missing:
        raise WaitTimeoutError(
            f"waited {timeout_s:g} s for probes of {len(missing)} of {len(refs)} devices"
        )
    found: list[tuple[str, tuple[int, ...]]] = ray.get(refs)
    return found


def _look_around() -> tuple[str, tuple[int, ...]]:
    """Return Ray's name of the GPU of this task, empty without one, and the cores of this node."""
    names = ray.get_gpu_ids()
    return (str(names[0]) if names else ""), cores()
