"""The differences between kinds of devices, and facts about this machine and its processes.

A platform says on which device tensors are and how ranks communicate. `roll.platform.machine` does
not import torch; the platforms do, in the methods that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.platform.base import Platform


def get_platform(name: str) -> Platform:
    """Return the platform with the name `cpu` or `cuda`.

    Raises:
        ValueError: there is no platform with this name.
    """
    # Imported here, so that `roll.platform.machine` can be imported without them.
    if name == "cpu":
        from roll.platform.cpu import CpuPlatform

        return CpuPlatform()
    if name == "cuda":
        from roll.platform.cuda import CudaPlatform

        return CudaPlatform()
    raise ValueError(f"unknown platform {name!r} (known: cpu, cuda)")
