"""The one place that builds the environment of actors, and of Ray before it starts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from roll.distributed.processes.reaper import start_reaper

WORKER_TOKEN = "ROLL_WORKER_TOKEN"
"""Marks a worker and all its children; the reaper finds them by it."""

RUN_TOKEN = "ROLL_RUN_TOKEN"
"""Marks all that a driver starts on its machine, Ray included."""

PASSED_THROUGH = (
    "CUDA_DEVICE_ORDER",
    "GLOO_SOCKET_IFNAME",
    "HF_DATASETS_OFFLINE",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "TORCHDYNAMO_DISABLE",
    "TRANSFORMERS_OFFLINE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_LOGGING_LEVEL",
)
"""Variables of the driver that actors on other nodes must see too."""

TUNABLES = "GLIBC_TUNABLES"

KEEP_FREED_MEMORY = {
    # glibc hands large blocks back to the kernel when they are freed, and takes new ones, page
    # fault by page fault, in the next micro-batch: a third of a training step in the threads of an
    # actor (benchmarks/overhead.py). One heap that never shrinks has no faults after step two.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    # In pages of 2 MB where the kernel has them for who asks: 1 to 2 % less of a step.
    TUNABLES: "glibc.malloc.hugetlb=1",
}
"""For workers that compute with torch on the CPU; what the user sets wins."""

WITHOUT_TRITON = "ROLL_WITHOUT_TRITON"
"""Set for the same workers: transformers would import triton, 70 MB of kernels for GPUs."""

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Events of every call, for `ray list tasks`: the control store keeps 100,000 of them, and grew
    # by 150 MB in 1,000 steps (benchmarks/soak.py).
    "RAY_task_events_report_interval_ms": "0",
}

LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Where all workers are on one machine, their process groups listen on its loopback interface; by
itself gloo takes the interface of the machine's name, and NCCL the first that reaches others."""


def actor_env(
    *,
    platform: str,
    devices: Sequence[int],
    cores: Sequence[int],
    token: str,
    python_path: Sequence[str] = (),
    keep_memory: bool = False,
    single_host: bool = False,
    driver_environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables of one actor, on top of those of its node.

    Args:
        devices: real device numbers on the actor's node.
        cores: CPU cores it may keep busy.
        python_path: folders with user code (beside the YAML file), searched first.
        keep_memory: set `KEEP_FREED_MEMORY`.
        single_host: all workers of the run are on one machine.
    """
    driver = os.environ if driver_environ is None else driver_environ
    env = on_one_machine(driver) if single_host else {}
    env |= {name: driver[name] for name in PASSED_THROUGH if name in driver}
    threads = str(len(cores))
    env |= {
        WORKER_TOKEN: token,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # The tokenizer's own threads would compete with the worker's and warn after a fork.
        "TOKENIZERS_PARALLELISM": "false",
        # Roles borrow slots and ask Ray for no device, and Ray would hide all devices from them.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }
    if keep_memory:
        env |= {name: driver.get(name, value) for name, value in KEEP_FREED_MEMORY.items()}
        env[WITHOUT_TRITON] = "1"
    folders = [*python_path, *driver.get("PYTHONPATH", "").split(os.pathsep)]
    joined = os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
    if joined:
        env["PYTHONPATH"] = joined
    if platform == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in devices)
    return env


def on_one_machine(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`LOOPBACK_ONLY`, but for what the user has set."""
    return {name: environ.get(name, value) for name, value in LOOPBACK_ONLY.items()}


@contextmanager
def environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Variables of this process and of what it starts, as long as the block lasts; None: unset."""

    def set_all(variables: Mapping[str, str | None]) -> None:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    before = {name: os.environ.get(name) for name in wanted}
    set_all(wanted)
    try:
        yield
    finally:
        set_all(before)


def replace_environment(wanted: Mapping[str, str]) -> None:
    """Give this process other variables than it was started with: those and no more."""
    os.environ.clear()
    os.environ.update(wanted)


def prepare_ray() -> None:
    """Set what Ray reads when it starts on this machine; what the user set stays.

    Also marks everything this process starts from now on, and sets a reaper on the mark: should the
    driver be killed, Ray's own helpers would otherwise live on for a minute.
    """
    for name, value in RAY_VARIABLES.items():
        os.environ.setdefault(name, value)
    # The process number tells an own mark from one inherited from a driver that started this one.
    own = f"{os.getpid()}-"
    if not os.environ.get(RUN_TOKEN, "").startswith(own):
        os.environ[RUN_TOKEN] = own + uuid.uuid4().hex
        start_reaper(f"{RUN_TOKEN}={os.environ[RUN_TOKEN]}")
