"""Device differences and nothing else: where tensors live, how ranks talk, what the machine has.

`roll.platform.machine` needs no torch; the platforms themselves do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.platform.base import Platform


def get_platform(name: str) -> Platform:
    """The platform called `cpu` or `cuda`.

    Raises:
        ValueError: another name.
    """
    # Imported here, so that asking what the machine has costs no torch.
    if name == "cpu":
        from roll.platform.cpu import CpuPlatform

        return CpuPlatform()
    if name == "cuda":
        from roll.platform.cuda import CudaPlatform

        return CudaPlatform()
    raise ValueError(f"unknown platform {name!r} (known: cpu, cuda)")
