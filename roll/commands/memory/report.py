"""Lines and table of `roll check` about the memory of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from roll.commands.memory.needs import Needs
from roll.commands.memory.plan import (
    Devices,
    RoleMemory,
    beside,
    gib,
    in_turns,
    of_devices,
    of_roles,
    on_devices,
)
from roll.config.run import RunConfig

TITLE = "estimated GiB on a device"
"""Title of the table of `report`."""
COLUMNS = (
    "role",
    "devices",
    "weights",
    "gradi-\nents",
    "moments",
    "activa-\ntions",
    "KV\ncache",
    "buffers",
    "all",
)
"""Headings of the rows of `report`, so narrow that the table fits a terminal of 80 columns."""


def table(rows: list[tuple[str, ...]]) -> Table:
    """Return the rows of `report` as a table in which no name of a role is cut."""
    made = Table(title=TITLE, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for number, heading in enumerate(COLUMNS):
        made.add_column(heading, no_wrap=number == 0, justify="right" if number else "left")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def report(config: RunConfig, devices: Devices) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a row for each role, and lines about devices and about models that are not here."""
    roles, unknown = of_roles(config, devices)
    lines = [
        *_device_lines(config, roles, devices),
        *_other_way_lines(config, roles, devices),
        *_host_lines(roles),
    ]
    if unknown:
        lines.append(
            f"memory not estimated: no config.json of {', '.join(unknown)} on this machine (its "
            "model card's `config.json` is enough), or one of an architecture that is not counted, "
            "or of quantised weights whose safetensors files are not here"
        )
    return [_row(each) for each in roles], lines


def _row(role: RoleMemory) -> tuple[str, ...]:
    needs = role.needs
    sizes = (
        needs.weights,
        needs.gradients,
        needs.moments,
        needs.activations,
        needs.kv_cache,
        needs.buffers,
        needs.total,
    )
    return role.role, str(len(role.devices)), *(gib(size) if size else "-" for size in sizes)


def _device_lines(config: RunConfig, roles: list[RoleMemory], devices: Devices) -> Iterator[str]:
    """Yield a line for each group of devices that need the same."""
    together: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for device, moment in of_devices(config, roles, devices.platform).items():
        together.setdefault(tuple(moment.items()), []).append(device)
    known = "" if devices.memory is None else f", of {gib(devices.memory)}"
    whose = " of the machine" if devices.platform == "cpu" else ""
    for needs, numbers in together.items():
        parts = " + ".join(role for role, _ in needs)
        most = sum(size for _, size in needs)
        named = ", ".join(_runs(numbers))
        has = known + whose if known else ""
        tight = ", which may not be enough" if _exceeds(most, devices) else ""
        yield f"device {named}: at most about {gib(most)} GiB each ({parts}){has}{tight}"


def _other_way_lines(config: RunConfig, roles: list[RoleMemory], devices: Devices) -> Iterator[str]:
    """Yield a line for each group of GPUs that roles share: what the other value of
    `cluster.colocate` would save or cost there."""
    if devices.platform == "cpu":
        return
    together: dict[str, list[int]] = {}
    for device, own in on_devices(roles).items():
        turns, at_once = (sum(way(config, own).values()) for way in (in_turns, beside))
        if turns < at_once:  # else they are there together in any case
            said = _other_way(config, own, devices, turns=turns, at_once=at_once)
            together.setdefault(said, []).append(device)
    for said, numbers in together.items():
        yield f"device {', '.join(_runs(numbers))}: {said}"


def _other_way(
    config: RunConfig, own: Mapping[str, Needs], devices: Devices, *, turns: int, at_once: int
) -> str:
    """Return what the other value of `cluster.colocate` would mean for a GPU with these roles.

    Args:
        turns: bytes on it at the worst moment if they take turns.
        at_once: bytes if they stay beside each other.
    """
    # What stays while nothing runs leaves the device and comes back; a KV cache is only dropped.
    moved = 2 * sum(needs.resident for needs in own.values())
    moves = f"about {gib(moved)} GiB a step between the GPU and the memory of its machine"
    if config.cluster.colocate == "beside":
        return (
            f"cluster.colocate: turns would need {gib(at_once - turns)} GiB less on each, and move "
            f"{moves}"
        )
    caches = sum(needs.kv_cache for needs in own.values())
    of_caches = f", {gib(caches)} of it KV caches" if caches else ""
    fits = ""
    if devices.memory is not None:
        fits = ", and fit" if at_once <= devices.memory else ", which is more than it has"
    return (
        f"taking turns moves {moves}; cluster.colocate: beside would move nothing, but need about "
        f"{gib(at_once)} GiB on each{of_caches}{fits}"
    )


def _host_lines(roles: list[RoleMemory]) -> Iterator[str]:
    """Yield a line for each role that keeps inputs of layers in the memory of its machine, or whose
    states are copied there for checkpoints."""
    for each in roles:
        if each.needs.hosted:
            yield (
                f"{each.role}: each rank keeps about {gib(each.needs.hosted)} GiB of inputs of "
                "layers in the memory of its machine (strategy.offload_activations)"
            )
        if each.needs.copied:
            yield (
                f"{each.role}: while a checkpoint is written (checkpoint.asynchronous) each rank "
                f"has about {gib(each.needs.copied)} GiB more in the memory of its machine"
            )


def _exceeds(most: int, devices: Devices) -> bool:
    """Return whether a GPU has less than the estimate; without GPUs devices share the memory."""
    return devices.platform == "cuda" and devices.memory is not None and most > devices.memory


def _runs(numbers: list[int]) -> Iterator[str]:
    """Yield runs of ascending numbers, such as 0-3."""
    first = numbers[0]
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        if following != number + 1:
            yield str(first) if first == number else f"{first}-{number}"
            first = number if following is None else following
