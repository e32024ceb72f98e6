"""A receiver's memory of a bucket: tensors are used where they lie, and never change under the
hand of whoever still uses them when the next bucket comes in.

Engines keep tensors for a while: one that fuses q, k and v keeps the first two until the third is
there. A slot therefore knows which of its tensors are still referred to, by them or by views of
them, and `recycle` makes sure that those keep their bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from roll.weight_sync.manifest import TensorMeta

_HUGE_PAGE = 2 << 20


class ReceiveBuffer(Protocol):
    """Memory of one bucket after the other."""

    @property
    def memory(self) -> Tensor:
        """All of it, uint8; for the transport, and for pieces that are copied out at once."""
        ...

    def view(self, offset: int, meta: TensorMeta) -> Tensor:
        """The tensor whose bytes begin at `offset`; it must not be written to."""
        ...

    def in_use(self) -> bool:
        """Whether anybody still refers to a tensor that `view` gave out."""
        ...

    def recycle(self) -> None:
        """Make room for the next bucket; tensors still in use keep their bytes."""
        ...


class _MappedBuffer(ABC):
    """Memory that knows which of its tensors are still referred to."""

    def __init__(self) -> None:
        self._given: list[tuple[weakref.ref[memoryview], int, int]] = []
        self._renew()

    @property
    def memory(self) -> Tensor:
        return self._memory

    def view(self, offset: int, meta: TensorMeta) -> Tensor:
        end = offset + meta.num_bytes
        # A tensor, and every view of it, keeps the buffer it was made from alive, and a buffer of
        # its own tells whether there still is one.
        buffer = memoryview(self._mapping)[offset:end]
        self._given.append((weakref.ref(buffer), offset, end))
        return torch.frombuffer(buffer, dtype=meta.torch_dtype).reshape(meta.shape)

    def in_use(self) -> bool:
        return bool(self._live())

    def recycle(self) -> None:
        live = self._live()
        self._keep(live)
        self._given.clear()
        if live:
            self._renew()

    @abstractmethod
    def _mapped(self) -> mmap.mmap:
        """Memory for the next bucket."""

    @abstractmethod
    def _keep(self, live: Sequence[tuple[int, int]]) -> None:
        """Make these bytes last."""

    def _live(self) -> list[tuple[int, int]]:
        """(first byte, end) of those in use."""
        return [(first, end) for buffer, first, end in self._given if buffer() is not None]

    def _renew(self) -> None:
        self._mapping = self._mapped()
        self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)


class SharedBuffer(_MappedBuffer):
    """A bucket in memory that a sender of the same host writes to.

    It is mapped copy-on-write: read in place as long as nobody writes here, and a page that is
    written to becomes this process's own. So a tensor that must outlast the bucket gets pages of
    its own at the same address, and the bucket is mapped anew beside it.
    """

    def __init__(self, fd: int, start: int, num_bytes: int) -> None:
        """`start` is a multiple of the page size. The descriptor stays the caller's."""
        self._fd = fd
        self._start = start
        self._num_bytes = num_bytes
        super().__init__()

    def _mapped(self) -> mmap.mmap:
        return mmap.mmap(self._fd, self._num_bytes, flags=mmap.MAP_PRIVATE, offset=self._start)

    def _keep(self, live: Sequence[tuple[int, int]]) -> None:
        for first, end in live:
            page = first // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory[page : end : mmap.PAGESIZE].add_(0)  # a write, which copies the page


class PrivateBuffer(_MappedBuffer):
    """A bucket in this process's own memory, which a transport copies into. Tensors in use keep
    the whole of it; the next bucket gets another."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        super().__init__()

    def _mapped(self) -> mmap.mmap:
        return anonymous(self._num_bytes)

    def _keep(self, live: Sequence[tuple[int, int]]) -> None:
        """They last as long as their mapping, which nobody else has."""


class DeviceBuffer:
    """A bucket on a GPU. Tensors are copied out, which costs little there."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    @property
    def memory(self) -> Tensor:
        return self._memory

    def view(self, offset: int, meta: TensorMeta) -> Tensor:
        raw = self._memory[offset : offset + meta.num_bytes].clone()
        return raw.view(meta.torch_dtype).reshape(meta.shape)

    def in_use(self) -> bool:
        return False

    def recycle(self) -> None:
        """Wait for this process's copies: the sender's stream does not know of them."""
        torch.cuda.current_stream().synchronize()


def anonymous(num_bytes: int) -> mmap.mmap:
    """Fresh memory in huge pages where the system has them: small ones cost more than the copy."""
    # Private: shared anonymous memory is tmpfs, which has no huge pages by default.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without them; the advice is all there is
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def empty_tensor(meta: TensorMeta, device: torch.device) -> Tensor:
    """A tensor to be filled, in memory of its own."""
    if device.type != "cpu" or meta.num_bytes == 0:
        return torch.empty(meta.shape, dtype=meta.torch_dtype, device=device)
    flat = torch.frombuffer(anonymous(meta.num_bytes), dtype=meta.torch_dtype)
    return flat.reshape(meta.shape)
