"""Lines and table of `roll check` about the memory of a run."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from roll.commands.memory.plan import Devices, RoleMemory, gib, of_devices, of_roles
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
    lines = [*_device_lines(config, roles, devices), *_copy_lines(roles)]
    if unknown:
        lines.append(
            f"memory not estimated: no config.json of {', '.join(unknown)} on this machine (its "
            "model card's `config.json` is enough), or one of an architecture that is not counted"
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


def _copy_lines(roles: list[RoleMemory]) -> Iterator[str]:
    """Yield a line for each role whose states are copied for checkpoints."""
    for each in roles:
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
