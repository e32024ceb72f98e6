"""What `adapt_to_cpu` changes, and that it changes nothing where there is CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

STATE = """
import sys, warnings
import torch
from mcore_adapter.platform import adapt_to_cpu

def state():
    import megatron.core.pipeline_parallel.schedules as schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.router import TopKRouter
    return [
        schedules.torch, torch.Tensor.cuda, torch.Tensor.record_stream, torch.zeros,
        torch.cuda.synchronize, random._get_cuda_rng_state, TopKRouter._apply_expert_bias,
    ]
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STATE + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_nothing_is_touched_where_there_is_cuda_or_at_import() -> None:
    run(
        "before = state()\n"
        "assert not adapt_to_cpu(has_cuda=True)\n"
        "import mcore_adapter.modeling.model\n"
        "assert all(a is b for a, b in zip(state(), before, strict=True))\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_only_megatron_sees_another_torch_and_the_second_call_changes_nothing() -> None:
    run(
        "before = state()\n"
        "assert adapt_to_cpu()\n"
        "first = state()\n"
        "assert first[0] is not torch and first[3] is before[3] and first[4] is before[4]\n"
        "assert str(first[0].zeros(1, device='cuda').device) == 'cpu'\n"
        "assert adapt_to_cpu()\n"
        "assert all(a is b for a, b in zip(state(), first, strict=True)), (first, state())\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_importing_megatron_is_quiet() -> None:
    code = (
        "from mcore_adapter.platform import adapt_to_cpu; adapt_to_cpu()\n"
        "import mcore_adapter.modeling.data_parallel, mcore_adapter.modeling.model\n"
        "import mcore_adapter.load, mcore_adapter.gather, mcore_adapter.parallel.schedule\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


LEAVE = """
import torch.distributed as dist
from megatron.core import parallel_state
from mcore_adapter.modeling.model import init_parallel, leave_parallel
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu

def begin(name):
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=0, world_size=1)

adapt_to_cpu()
begin("first")
"""


def leave(folder: Path, code: str) -> None:
    run(f"folder = {str(folder)!r}\n" + LEAVE + code)


def test_groups_that_megatron_destroys_itself_are_left_alone(tmp_path: Path) -> None:
    """As in a world of nccl, for which Megatron-Core makes second groups of gloo."""
    leave(
        tmp_path,
        "parallel_state.initialize_model_parallel(create_gloo_process_groups=True)\n"
        "own = parallel_state.get_data_parallel_group()\n"
        "leave_parallel()\n"
        "assert own not in dist.distributed_c10d._world.pg_map\n"
        "assert len(dist.distributed_c10d._world.pg_map) == 1\n",
    )


def test_groups_of_a_world_that_has_ended_are_forgotten(tmp_path: Path) -> None:
    leave(
        tmp_path,
        "init_parallel(ParallelSizes())\n"
        "dist.destroy_process_group()\n"
        "begin('second')\n"
        "init_parallel(ParallelSizes())\n"
        "leave_parallel()\n"
        "assert len(dist.distributed_c10d._world.pg_map) == 1\n",
    )
