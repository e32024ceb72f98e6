"""Stand-in for SGLang's compiled kernels on a machine without a GPU.

The package index has no CPU build of `sgl_kernel`, but SGLang imports names from it when it runs on
a CPU. Dense models call only one of these kernels, the hash for seeded sampling; SGLang has plain
PyTorch code for the rest. A model that needs another kernel fails at the first call, and the error
names the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a stand-in for any other kernel, which raises a RuntimeError when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"this model needs the compiled kernel sgl_kernel.{name}, which does not exist for "
            "CPUs as a package; build SGLang's CPU kernels from source, or use another engine"
        )

    return missing


def _murmur_hash32(seed_N: Tensor, positions_N: Tensor, columns_V: Tensor) -> Tensor:
    """Hash (seed, position, column) with MurmurHash3 (x86, 32 bits), like SGLang's Triton kernel.

    Args:
        seed_N: seeds, uint64 `[N]`; first the low, then the high 32 bits are hashed.

    Returns:
        Hashes, uint32 `[N, V]`.
    """
    seed_N = seed_N.view(torch.int64)
    state_N = torch.zeros_like(seed_N)
    for block_N in (seed_N & _MASK, (seed_N >> 32) & _MASK, positions_N.to(torch.int64) & _MASK):
        state_N = _mix(state_N, block_N)
    state_NV = _mix(state_N[:, None], columns_V.to(torch.int64)[None] & _MASK)
    state_NV = state_NV ^ 16  # length of the hashed input, in bytes
    state_NV = ((state_NV ^ (state_NV >> 16)) * 0x85EBCA6B) & _MASK
    state_NV = ((state_NV ^ (state_NV >> 13)) * 0xC2B2AE35) & _MASK
    return (state_NV ^ (state_NV >> 16)).to(torch.uint32)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    """Mix one 4-byte block into the state; products that overflow keep their low 32 bits."""
    block = _rotate((block * 0xCC9E2D51) & _MASK, 15)
    state = _rotate(state ^ ((block * 0x1B873593) & _MASK), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _rotate(value: Tensor, bits: int) -> Tensor:
    """Rotate 32-bit values, held in int64, to the left by `bits`."""
    return ((value << bits) | (value >> (32 - bits))) & _MASK


_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")
