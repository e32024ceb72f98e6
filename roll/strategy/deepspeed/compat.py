"""Where DeepSpeed 0.19 needs help: each workaround is a function that says why.

The supported version range itself stands in `roll/strategy/available.py`. This module is imported
before `deepspeed` itself.
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
    """Keep DeepSpeed's log to errors; call it before `deepspeed` is imported.

    It sets the level of its logger when it is imported, and warns at once (of a machine without a
    GPU); a filter on the logger stays.
    """
    logger = logging.getLogger("DeepSpeed")
    if _errors_only not in logger.filters:
        logger.addFilter(_errors_only)


@contextmanager
def silent() -> Iterator[None]:
    """Around DeepSpeed's building of its optimizers, some of which print the memory in use."""
    with redirect_stdout(StringIO()):
        yield


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def use_accelerator(kind: str) -> None:
    """Make DeepSpeed compute where this process does, whatever else the machine has.

    Its CPU accelerator compiles a kernel for collectives in shared memory as soon as a process
    group is taken over, which needs g++ and half a minute; gloo does without.
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


def give_back_linear() -> None:
    """Undo what ZeRO-3 does to linear layers, all over the process and for good.

    Its own function for them does not keep gathered weights for the backward pass; it says of
    itself that it stays until somebody puts the old one back.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    if torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = InsertPostInitMethodToModuleSubClasses.linear_bk


def forget_left_groups() -> None:
    """Drop the process groups that DeepSpeed keeps of a default group which was left since.

    It clears them only where it destroys the default group itself; ours is left by whoever joined.
    """
    from deepspeed.utils import groups

    kept = groups._WORLD_GROUP
    if kept is not None and kept not in dist.distributed_c10d._world.pg_map:
        groups._release_process_group_references()
