"""Machines, device pools, and which devices each role borrows."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from roll.config.base import Config


def parse_devices(text: str) -> tuple[int, ...]:
    """`"0-3,6"` -> (0, 1, 2, 3, 6).

    Raises:
        ValueError: another form, a range that runs backwards, or a device named twice.
    """
    devices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is no device list; write it like '0-3' or '0,2,4-7'"
            )
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise ValueError(f"device range {part.strip()!r} runs backwards")
        devices += range(first, last + 1)
    if len(set(devices)) != len(devices):
        raise ValueError(f"{text!r} names a device twice")
    return tuple(devices)


def _check_devices(text: str) -> str:
    parse_devices(text)
    return text


def _one_device(value: Any) -> Any:
    """`0`, which YAML and the command line read as a number, means "0"."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number and value >= 0 else value


DeviceList = Annotated[str, BeforeValidator(_one_device), AfterValidator(_check_devices)]


class ClusterConfig(Config):
    """The machines of the job. A device is a GPU, or a share of the cores where there are none."""

    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs where there are any."""
    nodes: int = Field(default=1, ge=1)
    """Number of machines; job-wide device d is device d % devices_per_node of node
    d // devices_per_node."""
    devices_per_node: int | None = Field(default=None, ge=1)
    """Devices of each machine. Left out: its GPUs; without GPUs as many slots as the pools name,
    each with an equal share of the cores."""
    address: str | None = None
    """Ray cluster to join, `host:port`. Left out: RAY_ADDRESS if set, else a local one is started
    and stopped with the run; without what `ray status` and `ray list` ask."""
    start_timeout_s: float = Field(default=900, gt=0)
    """How long workers, engines and missing nodes may take to come up: to load weights, and on GPUs
    to compile kernels and capture graphs. Models of the hub are downloaded before, which has no
    limit; nodes that share no cache with the driver's download within it. It is a time and asks
    for no progress: processes that wait for one another in vain compute as well."""
    call_timeout_s: float = Field(default=3600, gt=0)
    """How long one call to a worker may take."""
