"""Two buckets in GPU memory, opened by a process on the same GPU through CUDA IPC handles."""

from __future__ import annotations

import base64
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.receive_buffer import DeviceBuffer

_PLACE: dict[str, type] = {
    "tensor_offset": int,
    "storage_device": int,
    "storage_handle": bytes,
    "storage_size_bytes": int,
    "storage_offset_bytes": int,
    "ref_counter_handle": bytes,
    "ref_counter_offset": int,
    "event_handle": bytes,
    "event_sync_required": bool,
}
"""Parameters of PyTorch's `rebuild_cuda_tensor` that tell which memory to open, with their types.

Its other parameters are the same for all buckets, because buckets are flat tensors of bytes."""


@dataclass(frozen=True, slots=True)
class CudaBuckets:
    """The sender's two buckets on its current GPU."""

    memory: Tensor
    buckets: tuple[Tensor, Tensor]

    @classmethod
    def create(cls, num_bytes: int) -> CudaBuckets:
        """Create two buckets of `num_bytes` each on the current GPU."""
        num_bytes = max(num_bytes, 1)  # empty memory has no CUDA IPC handle
        with in_one_piece():
            memory = torch.empty(2 * num_bytes, dtype=torch.uint8, device="cuda")
        return cls(memory, (memory[:num_bytes], memory[num_bytes:]))

    def describe(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Return a message from which a receiver can open the same memory, and no descriptors."""
        _, arguments = _reduce(self.memory)
        return {"kind": "cuda", **place_message(arguments)}, ()

    def sync(self) -> None:
        """Wait until this process's copies are done: the receiver's stream does not do that."""
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Do nothing: the memory is free once the last receiver has closed it, and `free_cached`
        gives it back to the device."""


def without_expandable_segments(settings: str) -> str:
    """Return settings of PyTorch's allocator of GPU memory (`PYTORCH_ALLOC_CONF`) with expandable
    segments switched off."""
    return re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", settings)


@contextmanager
def in_one_piece() -> Iterator[None]:
    """Allocate GPU memory without expandable segments during the block.

    Their handles are file descriptors, which a process opens only if it may trace this one.
    Containers forbid that, and most systems do to processes that are no ancestors.
    """
    functions: Any = torch._C
    before: str = functions._accelerator_getAllocatorSettings()
    wanted = without_expandable_segments(before)
    if wanted != before:  # a change resets all settings that it does not name
        functions._accelerator_setAllocatorSettings(wanted)
    try:
        yield
    finally:
        if wanted != before:
            functions._accelerator_setAllocatorSettings(before)


def open_cuda_buckets(description: dict[str, Any]) -> tuple[DeviceBuffer, DeviceBuffer]:
    """Open the sender's two buckets. Hold them only while receiving: they keep its memory in use.

    Raises:
        WeightSyncError: the description does not come from `CudaBuckets.describe`.
    """
    memory = _rebuild(place_arguments(description))
    half = len(memory) // 2
    return DeviceBuffer(memory[:half]), DeviceBuffer(memory[half:])


def place_message(arguments: Sequence[Any]) -> dict[str, Any]:
    """Encode the arguments of `rebuild_cuda_tensor` for a flat tensor of bytes as plain JSON.

    PyTorch itself pickles the function together with its arguments. A receiver that unpickles such
    a message calls any function that the message names, which is unsafe.
    """
    named = dict(zip(inspect.signature(rebuild_cuda_tensor).parameters, arguments, strict=True))
    place = {name: named[name] for name in _PLACE}
    return {
        "num_bytes": named["tensor_size"][0],
        "place": {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in place.items()
        },
    }


def place_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Decode a message of `place_message`, which tells where the buckets lie in GPU memory.

    Returns:
        Keyword arguments of PyTorch's `rebuild_cuda_tensor`, which opens that memory.

    Raises:
        WeightSyncError: a field is missing or of another type.
    """
    try:
        place = {name: _plain(message["place"][name], kind) for name, kind in _PLACE.items()}
        num_bytes = _plain(message["num_bytes"], int)
    except (KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(
            f"weight transfer: the sender's description of its GPU memory is damaged ({error!r}); "
            "do all processes run the same version of roll?"
        ) from error
    return {
        "tensor_cls": Tensor,
        "tensor_size": (num_bytes,),
        "tensor_stride": (1,),
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "requires_grad": False,
        **place,
    }


def _plain(value: Any, kind: type) -> Any:
    """Return a value of a JSON message as `kind`; bytes come as base64.

    Raises:
        TypeError, ValueError: the value is of another type, or no base64.
    """
    if kind is bytes:
        return base64.b64decode(value, validate=True)
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _reduce(memory: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return PyTorch's own description of GPU memory: `rebuild_cuda_tensor` and its arguments."""
    reduced: tuple[Any, tuple[Any, ...]] = reduce_tensor(memory)  # type: ignore[no-untyped-call]
    return reduced


def _rebuild(arguments: dict[str, Any]) -> Tensor:
    """Open memory of another process on the same GPU."""
    memory: Tensor = rebuild_cuda_tensor(**arguments)  # type: ignore[no-untyped-call]
    return memory
