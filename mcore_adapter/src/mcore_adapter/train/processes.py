"""Process group of a run, and the request to stop a run."""

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
"""Time limit of one collective. It is long because the other ranks wait in a collective while rank
0 reads the data or writes the model."""


@contextmanager
def joined(sizes: ParallelSizes, seed: int) -> Iterator[torch.device]:
    """Join the ranks that torchrun started, and yield the device of this rank.

    Without torchrun this process is the only rank. If a default process group exists, it is used
    and not destroyed afterwards.

    Raises:
        LayoutError: the number of ranks does not divide by the parallel sizes.
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
    # Not after an error: other ranks may then wait in a collective, and destroying the group would
    # wait for them.
    if owner:
        dist.destroy_process_group()


def stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL of a single process listen only on the loopback interface.

    By default gloo listens on the interface of the machine's host name, which other machines can
    reach. Variables that the user has set are not changed.

    Args:
        environ: environment variables, changed in place.
    """
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


class StopRequest:
    """Request to stop a run, made by Ctrl-C or SIGTERM.

    The run stops after the present step. A second Ctrl-C stops it at once.
    """

    def __init__(self) -> None:
        self.made = False
        self.number: int = signal.SIGINT
        """Number of the signal; SIGINT if only other ranks have got one."""

    def _make(self, number: int, _: FrameType | None) -> None:
        """Note the request, as handler of a signal; KeyboardInterrupt for SIGINT after a
        request."""
        if self.made and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.made:
            self.number = number
        self.made = True

    @contextmanager
    def heard(self) -> Iterator[StopRequest]:
        """Handle SIGINT and SIGTERM within the block."""
        before = {each: signal.signal(each, self._make) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
