"""Workarounds for DeepSpeed 0.19. Each is a function whose docstring gives the reason.

The supported versions are in `roll/strategy/available.py`. Import this module before `deepspeed`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist


def quiet() -> None:
    """Limit DeepSpeed's log to errors. Call this before `deepspeed` is imported.

    A filter is used because the import of DeepSpeed sets the level of the logger, and logs a
    warning at once on a machine without a GPU.
    """
    logger = logging.getLogger("DeepSpeed")
    if _errors_only not in logger.filters:
        logger.addFilter(_errors_only)


@contextmanager
def silent() -> Iterator[None]:
    """Discard stdout while DeepSpeed builds optimizers, some of which print the memory in use."""
    with redirect_stdout(StringIO()):
        yield


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def use_accelerator(kind: str) -> None:
    """Make DeepSpeed use this process's kind of device, whatever other devices the machine has.

    On CPUs a changed accelerator without compiled kernels is set. DeepSpeed's own CPU accelerator
    compiles a kernel for collectives in shared memory as soon as DeepSpeed takes over a process
    group. This needs g++ and half a minute; gloo needs no such kernel.

    Args:
        kind: `cpu` or `cuda`.
    """
    from deepspeed.accelerator import get_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.real_accelerator import set_accelerator

    class PlainCpu(CPU_Accelerator):  # type: ignore[misc]
        def create_op_builder(self, op_name: str) -> Any:
            return None

    have = get_accelerator()
    if kind == "cpu" and type(have).__name__ != PlainCpu.__name__:
        set_accelerator(PlainCpu())
    elif kind == "cuda" and have.device_name() != "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        set_accelerator(CUDA_Accelerator())


def restore_linear() -> None:
    """Restore `torch.nn.functional.linear`, which ZeRO-3 replaces for the whole process.

    ZeRO-3's function does not keep gathered weights for the backward pass, and DeepSpeed itself
    never restores the original function.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    if torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk


def drop_stale_groups() -> None:
    """Drop DeepSpeed's references to process groups of a destroyed default process group.

    DeepSpeed drops them only if DeepSpeed itself destroys the default group. Here `GroupMembership`
    does.
    """
    from deepspeed.utils import groups

    kept = groups._WORLD_GROUP
    if kept is not None and kept not in dist.distributed_c10d._world.pg_map:
        groups._release_process_group_references()
