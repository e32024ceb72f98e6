"""Construction of the environment variables of actors, and of Ray before it starts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from roll.distributed.processes.reaper import start_reaper

WORKER_TOKEN = "ROLL_WORKER_TOKEN"
"""Variable that marks a worker and all its child processes, so that the reaper can find them."""

RUN_TOKEN = "ROLL_RUN_TOKEN"
"""Variable that marks all processes that a driver starts on its machine, including Ray."""

PASSED_THROUGH = (
    "GLOO_SOCKET_IFNAME",
    "ROLL_SANDBOX_TOKEN",
    "TORCHDYNAMO_DISABLE",
    "TRANSFORMERS_OFFLINE",
)
"""Variables that actors take over from the driver, also on other nodes."""

PASSED_PREFIXES = (
    "CUDA_",
    "HF_",
    "NCCL_",
    "PYTORCH_",
    "SGLANG_",
    "TORCHINDUCTOR_",
    "TORCH_",
    "VLLM_",
)
"""Beginnings of the names of further such variables: settings of libraries, of which each release
has others."""

OF_ONE_NODE = ("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "VLLM_HOST_IP")
"""Variables that begin so, but whose value is right on one node, or in one process, alone."""

SECRET_ENDINGS = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")
"""Endings of the names of variables whose values are secrets."""

ONE_HEAP = {
    # By default, glibc gives threads heaps of their own (8 per core), and each heap stays as large
    # as it ever was. So a worker whose threads take turns grows for a long time, although it frees
    # everything (benchmarks/soak.py).
    "MALLOC_ARENA_MAX": "1",
}
"""Variables for all workers of runs on CPUs. Values set by the user take precedence."""

NO_CACHES = {
    # By default, each thread keeps up to seven freed blocks of each small size for itself. A worker
    # with 70 threads grows for thousands of steps until all of them have their share
    # (benchmarks/soak.py).
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}
"""The same, but read only when a program is loaded: forks have that of the fork server."""

KEEP_FREED_MEMORY = {
    # By default, glibc gives large blocks back to the kernel when they are freed. The next
    # micro-batch then allocates new ones, with a page fault per page. In the threads of an actor
    # this takes a third of a training step (benchmarks/overhead.py). With a single heap that never
    # shrinks, there are no page faults after the second step.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Variables for workers that compute with torch on the CPU, in addition to `ONE_HEAP`. Values set
by the user take precedence."""

SPIN_BRIEFLY = {
    # Threads of OpenMP spin after each parallel region, to be ready for the next: by default of GNU
    # 300,000 rounds, or about 10 ms. An engine computes for milliseconds in Python between its
    # steps. Meanwhile its threads take the cores from a policy that trains beside it: with
    # `max_staleness: 1` a step of the quickstart took 1.38 s with 20,000 rounds and 1.52 s with the
    # default, but of a model of 4 M parameters 3.66 and 3.33 s (one run of 8 steps each). In turns
    # the default is better: 1.23 and 1.17 s, 4.95 and 3.82 s (benchmarks/spinning.py).
    "GOMP_SPINCOUNT": "20000",
}
"""Variables for all workers of runs on CPUs in which roles compute at the same time, unless the
user has set one of `WAITING`."""

WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which users choose how long the threads of OpenMP spin; the first takes
precedence."""

WITHOUT_TRITON = "ROLL_WITHOUT_TRITON"
"""Variable that makes the same workers hide the package triton. Otherwise transformers would import
triton, which takes 70 MB and is only of use on GPUs."""

JEMALLOC = "MALLOC_CONF"
"""Variable with the settings of jemalloc, in processes that use this allocator."""

KEEP_ENVIRONMENT = {
    # A process that sets its title (Ray's do, and those of engines) writes the title over its
    # command and, if it is longer, over the environment variables behind it; the package
    # setproctitle then also clears some of them. The reaper would no longer find its mark there.
    "SPT_NOENV": "1",
}
"""Variables that keep the environment of a process readable for others, in `/proc/PID/environ`."""

RAY_VARIABLES = KEEP_ENVIRONMENT | {
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default, Ray gives workers the niceness 15. Beside other work on the machine they then
    # hardly run: with two busy programs on two cores, a step of the quickstart took 25 s in place
    # of 2.0 (benchmarks/busy.py).
    "RAY_worker_niceness": "0",
    # No events of calls for `ray list tasks`: Ray's control store would keep 100,000 events, and
    # grew by 150 MB in 1,000 steps (benchmarks/soak.py).
    "RAY_task_events_report_interval_ms": "0",
    # Ray loads jemalloc into its control store. With several arenas, and caches of freed blocks per
    # thread, the store grows even without work: by 2 MB in its first two minutes, here by 0.4 MB.
    JEMALLOC: "narenas:1,tcache:false",
}

FOR_ALL_ACTORS = KEEP_ENVIRONMENT | {
    # The tokenizer's threads would compete with those of the worker, and warn after a fork.
    "TOKENIZERS_PARALLELISM": "false",
    # Actors reserve no devices of Ray, and by default Ray hides all devices from them.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}

LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables that make process groups listen only on the loopback interface, for runs with all
workers on one machine. By default, gloo uses the interface of the machine's host name, and NCCL the
first interface that reaches other machines."""


def actor_env(
    *,
    platform: str,
    devices: Sequence[str],
    cores: Sequence[int],
    token: str,
    python_path: Sequence[str] = (),
    keep_memory: bool = False,
    single_host: bool = False,
    own: Mapping[str, str] | None = None,
    driver_environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables of one actor, which are added to those of its node, except `secrets`
    and `thread_waiting`.

    Args:
        platform: `cpu` or `cuda`.
        devices: names of the actor's GPUs on its node: numbers or UUIDs.
        cores: numbers of the actor's CPU cores; it gets one thread for each.
        token: value of `WORKER_TOKEN`.
        python_path: folders with user code (beside the YAML file), which are searched first.
        keep_memory: also set `KEEP_FREED_MEMORY` and `WITHOUT_TRITON`.
        single_host: True if all workers of the run are on one machine.
        own: variables of the actor's role, which come before all that are not of the run itself.
        driver_environ: variables of the driver, by default those of this process.
    """
    driver = os.environ if driver_environ is None else driver_environ
    taken = {name: value for name, value in taken_over(driver).items() if not is_secret(name)}
    driver = {**driver, **(own or {})}
    env = (on_one_machine(driver) if single_host else {}) | taken
    threads = str(len(cores))
    env |= {WORKER_TOKEN: token, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    env |= FOR_ALL_ACTORS
    tuned = (ONE_HEAP | NO_CACHES if platform == "cpu" else {}) | (
        KEEP_FREED_MEMORY if keep_memory else {}
    )
    env |= {name: driver.get(name, value) for name, value in tuned.items()}
    if keep_memory:
        env[WITHOUT_TRITON] = "1"
    env |= {name: value for name, value in (own or {}).items() if not is_secret(name)}
    folders = [*python_path, *driver.get("PYTHONPATH", "").split(os.pathsep)]
    joined = os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))
    if joined:
        env["PYTHONPATH"] = joined
    if platform == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return env


def secrets(
    own: Mapping[str, str], driver_environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables of one actor that are secrets. They must reach the actor by another way
    than the others: Ray writes those into its log files.

    Args:
        own: variables of the actor's role, which come before those of the driver.
        driver_environ: as in `actor_env`.
    """
    driver = os.environ if driver_environ is None else driver_environ
    known = {**taken_over(driver), **own}
    return {name: value for name, value in known.items() if is_secret(name)}


def taken_over(driver: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver that actors take over."""
    return {
        name: value
        for name, value in driver.items()
        if (name in PASSED_THROUGH or name.startswith(PASSED_PREFIXES)) and name not in OF_ONE_NODE
    }


def is_secret(name: str) -> bool:
    """Return whether the value of a variable is a secret, by its name."""
    return name.endswith(SECRET_ENDINGS)


def thread_waiting(environ: Mapping[str, str], *, overlapping: bool) -> dict[str, str]:
    """Return the variables that say how long the threads of OpenMP spin: those of `WAITING` in
    `environ`; or else `SPIN_BRIEFLY` if roles compute at the same time on the same cores
    (`overlapping`), or none, so that the library's default holds."""
    chosen = {name: environ[name] for name in WAITING if name in environ}
    return chosen or (dict(SPIN_BRIEFLY) if overlapping else {})


def on_one_machine(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables `LOOPBACK_ONLY`, with the values of `environ` where it has them."""
    return {name: environ.get(name, value) for name, value in LOOPBACK_ONLY.items()}


@contextmanager
def environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables of this process for the time of the block; processes started inside
    inherit them. The value None removes a variable."""

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


def add_to_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process."""
    os.environ.update(variables)


def replace_environment(wanted: Mapping[str, str]) -> None:
    """Replace all environment variables of this process by `wanted`."""
    os.environ.clear()
    os.environ.update(wanted)


def prepare_ray() -> None:
    """Set the variables that Ray reads when it starts on this machine, except those that the user
    has set.

    Also mark all processes that this process starts from now on, and start a reaper for the mark.
    Without the reaper, Ray's processes would live on for a minute after the driver was killed. A
    second call starts no second reaper.
    """
    for name, value in RAY_VARIABLES.items():
        if name == JEMALLOC and "jemalloc" in os.environ.get("LD_PRELOAD", ""):
            continue  # the user has it in all processes, and workers would take over the setting
        os.environ.setdefault(name, value)
    # The process id distinguishes this driver's mark from one inherited from another driver.
    own = f"{os.getpid()}-"
    if not os.environ.get(RUN_TOKEN, "").startswith(own):
        os.environ[RUN_TOKEN] = own + uuid.uuid4().hex
        start_reaper(f"{RUN_TOKEN}={os.environ[RUN_TOKEN]}")
