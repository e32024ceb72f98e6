"""vLLM's environment: what a user has set stays, except for the cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from roll.config.sections.engines import VllmConfig
from roll.strategy.vllm.compat import engine_environment, shut_down


def test_an_engine_on_cpus_keeps_few_kernels_unless_the_user_names_a_number() -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    assert engine_environment("cpu", (0, 1), 1, {})[name] == "64"
    assert name not in engine_environment("cpu", (0, 1), 1, {name: "500"})
    assert name not in engine_environment("cuda", (0, 1), 1, {})


def test_an_engine_on_cpus_compiles_where_it_is_told_and_keeps_the_code_in_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert engine_environment("cpu", (0, 1), 1, {})["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in engine_environment("cuda", (0, 1), 1, {})
    own, pytorch = str(tmp_path / ".cache/roll/inductor"), default_cache_dir()
    for named, folder in (("", own), (pytorch, own), ("/mine", "/mine")):
        have = {"TORCHINDUCTOR_CACHE_DIR": named} if named else {}
        found = engine_environment("cpu", (0, 1), 1, have, eager=False)
        assert found["TORCHINDUCTOR_CACHE_DIR"] == folder
        assert "TORCHDYNAMO_DISABLE" not in found


@pytest.mark.parametrize(
    ("asked", "cpu", "cuda"), [(None, True, False), (True, True, True), (False, False, False)]
)
def test_layers_run_as_they_are_on_cpus_unless_the_user_says_otherwise(
    asked: bool | None, cpu: bool, cuda: bool
) -> None:
    config = VllmConfig(enforce_eager=asked)
    assert (config.eager_on("cpu"), config.eager_on("cuda")) == (cpu, cuda)


def test_threads_are_bound_to_the_replicas_cores_whatever_is_set() -> None:
    have = {"VLLM_CPU_OMP_THREADS_BIND": "0-63", "OMP_NUM_THREADS": "9"}
    found = engine_environment("cpu", (2, 3), 1, have)
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert "OMP_NUM_THREADS" not in found


class DyingEngine:
    """An engine whose process ends while it is killed."""

    def __init__(self) -> None:
        self.engine_core = self
        self.cleaned = 0

    def shutdown(self, timeout_s: float) -> None:
        raise psutil.NoSuchProcess(12345)

    def resources(self) -> None:
        self.cleaned += 1


def test_a_process_that_ends_by_itself_while_it_is_killed_is_no_error() -> None:
    engine = DyingEngine()
    shut_down(engine, 0.1)
    assert engine.cleaned == 1


# In a process of its own, because process groups belong to a process.
GROUPS = """
import os
import time
import torch
import torch.distributed as dist
from roll.strategy.vllm.compat import one_gloo_thread

def count():
    time.sleep(2)  # a thread names itself some time after it was started
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum(name.startswith("gloo_tcp_loop") for name in names)

with one_gloo_thread():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = [dist.new_group([0], backend="gloo") for _ in range(3)]
shared = count()
ones = torch.ones(2)
for group in groups:
    dist.all_reduce(ones, group=group)
    dist.barrier(group=group)
assert ones.tolist() == [1.0, 1.0]
dist.new_group([0], backend="gloo")
print(shared, count())
dist.destroy_process_group()
"""


def test_groups_of_one_process_share_a_thread_and_later_ones_do_not() -> None:
    found = subprocess.run([sys.executable, "-c", GROUPS], capture_output=True, text=True)
    assert found.stdout.split() == ["1", "2"], found.stderr
