"""This process among the ranks, and how it is asked to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from mcore_adapter.modeling.model import init_parallel
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu

_TIMEOUT = timedelta(hours=4)
"""Of a collective; others wait while rank 0 reads the data and writes the model."""


@contextmanager
def joined(sizes: ParallelSizes, seed: int) -> Iterator[torch.device]:
    """Join the ranks that torchrun started, or be the only one; gives this rank's device.

    A default process group that exists is used, and left as it is.

    Raises:
        LayoutError: the ranks do not divide.
    """
    on_cpu = adapt_to_cpu()
    device = torch.device("cpu" if on_cpu else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    if not on_cpu:
        torch.cuda.set_device(device)
    owner = not dist.is_initialized()
    if owner:
        backend = "gloo" if on_cpu else "nccl"
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=_TIMEOUT)
        else:
            stay_on_loopback(os.environ)
            store = HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_TIMEOUT)
    init_parallel(sizes, seed=seed, timeout=_TIMEOUT)
    yield device
    # Not after an error, when others may wait in a collective that leaving would wait for, too.
    if owner:
        dist.destroy_process_group()


def stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Keep a process without others from listening where other machines reach it: by itself gloo
    takes the interface of the machine's name. What the user has set is what runs."""
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


class StopRequest:
    """Ctrl-C and SIGTERM ask to stop after the step; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.made = False

    def _make(self, number: int, _: FrameType | None) -> None:
        if self.made and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.made = True

    @contextmanager
    def heard(self) -> Iterator[StopRequest]:
        before = {each: signal.signal(each, self._make) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
