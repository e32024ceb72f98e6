"""A receiver's memory for a bucket, whose tensors can be used in place.

Engines keep tensors for a while: an engine that fuses q, k and v keeps the first two until the
third comes. The memory must not change under such a tensor when the next bucket arrives. A buffer
therefore knows which of its tensors, or views of them, are still referenced, and `recycle` makes
sure that these keep their bytes.
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
    """Memory that holds one bucket after another."""

    @property
    def memory(self) -> Tensor:
        """The whole memory, uint8, for the transport and for pieces that are copied out at once."""
        ...

    def view(self, offset: int, meta: TensorMeta) -> Tensor:
        """Return the tensor whose bytes begin at `offset`; the caller must not write to it."""
        ...

    def in_use(self) -> bool:
        """Return whether a tensor that `view` returned, or a view of one, is still referenced."""
        ...

    def recycle(self) -> None:
        """Free the memory for the next bucket; tensors still in use keep their bytes."""
        ...


class _MappedBuffer(ABC):
    """Mapped memory that knows which of its tensors are still referenced."""

    def __init__(self) -> None:
        self._given: list[tuple[weakref.ref[memoryview], int, int]] = []
        self._renew()

    @property
    def memory(self) -> Tensor:
        return self._memory

    def view(self, offset: int, meta: TensorMeta) -> Tensor:
        end = offset + meta.num_bytes
        # A tensor and all its views keep the memoryview alive that the tensor was made from. Each
        # tensor gets its own memoryview, so a weak reference shows whether one of them is left.
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
        """Return memory for the next bucket."""

    @abstractmethod
    def _keep(self, live: Sequence[tuple[int, int]]) -> None:
        """Make sure that the byte ranges `live`, (first, end) of each, keep their content."""

    def _live(self) -> list[tuple[int, int]]:
        """Return (first byte, end) of each tensor that is still in use."""
        return [(first, end) for buffer, first, end in self._given if buffer() is not None]

    def _renew(self) -> None:
        """Take new memory for the next bucket, and leave the old to the tensors in use."""
        self._mapping = self._mapped()
        self._memory = torch.frombuffer(self._mapping, dtype=torch.uint8)


class SharedBuffer(_MappedBuffer):
    """A bucket in memory that a sender of the same host writes to.

    The memory is mapped copy-on-write. Its pages are read in place until this process writes to
    one, which makes a copy of the page for this process at the same address. A tensor that must
    outlast the bucket keeps its bytes in this way, and the bucket is then mapped anew elsewhere.
    """

    def __init__(self, fd: int, start: int, num_bytes: int) -> None:
        """Map the bucket.

        Args:
            fd: descriptor of the shared memory; the caller closes it.
            start: first byte of the bucket in that memory, a multiple of the page size.
        """
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
    """A bucket in this process's own memory, into which a transport copies.

    Tensors in use keep the whole memory alive, and the next bucket gets new memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        super().__init__()

    def _mapped(self) -> mmap.mmap:
        return anonymous(self._num_bytes)

    def _keep(self, live: Sequence[tuple[int, int]]) -> None:
        """Do nothing: no later bucket is written to memory in which a tensor is in use."""


class DeviceBuffer:
    """A bucket on a GPU. Tensors are copied out of it, which is cheap on a GPU.

    Args:
        memory: memory of the bucket on the GPU, uint8.
    """

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
        """Wait until this process's copies are done; the sender's stream does not wait for them."""
        torch.cuda.current_stream().synchronize()


def anonymous(num_bytes: int) -> mmap.mmap:
    """Map new memory, in huge pages if possible: small ones cost more than the copy into them."""
    # MAP_PRIVATE: shared anonymous memory is tmpfs, which has no huge pages by default.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def empty_tensor(meta: TensorMeta, device: torch.device) -> Tensor:
    """Return an uninitialized tensor of the shape and dtype of `meta`, in memory of its own."""
    if device.type != "cpu" or meta.num_bytes == 0:
        return torch.empty(meta.shape, dtype=meta.torch_dtype, device=device)
    flat = torch.frombuffer(anonymous(meta.num_bytes), dtype=meta.torch_dtype)
    return flat.reshape(meta.shape)
