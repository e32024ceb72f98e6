"""Settings of machines, device pools, and the devices that each role uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from roll.config.base import Config

LAST_DEVICE = 99_999
"""Largest number of a device; a larger one is a slip, and its list would fill the memory."""


def parse_devices(text: str) -> tuple[int, ...]:
    """Parse a device list: `"0-3,6"` -> (0, 1, 2, 3, 6).

    Raises:
        ValueError: the text has another form, a range runs backwards, a device is named twice, or
            its number is too large.
    """
    devices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if match is None:
            raise ValueError(
                f"{part.strip()!r} is no device list; write it like '0-3' or '0,2,4-7'"
            )
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise ValueError(f"device range {part.strip()!r} runs backwards")
        if last > LAST_DEVICE:
            raise ValueError(f"device {last} is too large a number; the last is {LAST_DEVICE}")
        devices += range(first, last + 1)
    if len(set(devices)) != len(devices):
        raise ValueError(f"{text!r} names a device twice")
    return tuple(devices)


def nodes_of(devices: Sequence[int], per_node: int) -> list[int]:
    """Return the nodes on which some devices lie, in the order of the devices.

    Args:
        devices: job-wide numbers.
        per_node: number of devices of a node.
    """
    return list(dict.fromkeys(device // per_node for device in devices))


def placement_problem(devices: Sequence[int], per_node: int, *, several_nodes: bool) -> str | None:
    """Return why the devices of one worker cannot be where they are, and what to do; None if they
    can: they are on one node, or, with `several_nodes`, they are all devices of some nodes.

    Args:
        devices: job-wide numbers, in the order of the worker's processes.
        per_node: number of devices of a node.
        several_nodes: whether such a worker can lie on several nodes.
    """
    nodes = nodes_of(devices, per_node)
    if len(nodes) == 1:
        return None
    whole = [node * per_node + place for node in nodes for place in range(per_node)]
    if several_nodes and list(devices) == whole:
        return None
    numbers = ", ".join(map(str, devices))
    where = f"devices {numbers} make one engine but lie on several nodes of {per_node} devices"
    whole_nodes = -(-len(devices) // per_node) * per_node
    if len(devices) <= per_node:
        return f"{where}; name them so that each group is on one node, or use a smaller tp"
    if not several_nodes:
        return (
            f"{where}, and this engine lies on one node; use a smaller tp, or kind: vllm, whose "
            "engines can lie on several"
        )
    return (
        f"{where}; an engine of more devices than a node has takes whole nodes: let tp * pp be a "
        f"multiple of {per_node}, and let the pool name all devices of each node in order, such as "
        f"0-{whole_nodes - 1}"
    )


def _check_devices(text: str) -> str:
    """Return the text unchanged; ValueError if it is no device list."""
    parse_devices(text)
    return text


def _one_device(value: Any) -> Any:
    """Turn a non-negative number into text: YAML and the command line read `0` as a number."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number and value >= 0 else value


DeviceList = Annotated[str, BeforeValidator(_one_device), AfterValidator(_check_devices)]


_GROUPS = "process groups get ranks and addresses from the run"
_DEVICES = "devices: by `pools`"
OWN_VARIABLES = {
    "CUDA_DEVICE_ORDER": f"{_DEVICES}; set it in the shell that starts the run",
    "CUDA_VISIBLE_DEVICES": _DEVICES,
    "GROUP_RANK": _GROUPS,
    "LOCAL_RANK": _GROUPS,
    "LOCAL_WORLD_SIZE": _GROUPS,
    "MASTER_ADDR": _GROUPS,
    "MASTER_PORT": _GROUPS,
    "PYTHONPATH": "set it in the shell that starts the run",
    "RANK": _GROUPS,
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": _DEVICES,
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": _DEVICES,
    "SGLANG_CPU_OMP_THREADS_BIND": "cores: by `pools`",
    "SPT_NOENV": "it finds processes by their environment",
    "VLLM_CPU_KVCACHE_SPACE": "set `strategy.kv_cache_gb`",
    "VLLM_CPU_OMP_THREADS_BIND": "cores: by `pools`",
    "WORLD_SIZE": _GROUPS,
}
"""Variables that the run itself sets for each worker, or that would contradict it, beside those
that begin with `ROLL_`; and why, or what to set instead."""


def _text(value: Any) -> Any:
    """Turn numbers among the values of a mapping into text: YAML reads `NCCL_DEBUG_X: 1` so."""
    if not isinstance(value, dict):
        return value
    return {
        name: str(own) if isinstance(own, int | float) and not isinstance(own, bool) else own
        for name, own in value.items()
    }


def check_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return environment variables unchanged; ValueError if a name is none, or the run's own."""
    for name in variables:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if name in OWN_VARIABLES or name.startswith("ROLL_"):
            why = f" ({OWN_VARIABLES[name]})" if name in OWN_VARIABLES else ""
            raise ValueError(f"{name!r} is set by the run itself{why}")
    return variables


Variables = Annotated[dict[str, str], BeforeValidator(_text), AfterValidator(check_variables)]


class WorkersConfig(Config):
    """Settings that all roles have whose workers compute with a model."""

    env: Variables = {}
    """Environment variables of the role's workers alone, such as `{NCCL_IB_HCA: mlx5_0}`. They come
    before those that workers take over from the driver. `config.yaml` holds them: no place for
    secrets."""


class ClusterConfig(Config):
    """Machines of the job. A device is a GPU, or a share of the CPU cores where there are no
    GPUs."""

    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of devices to use. `auto` uses GPUs if there are any."""
    nodes: int = Field(default=1, ge=1)
    """Number of machines. Device d of the job is device d % devices_per_node of machine d //
    devices_per_node."""
    devices_per_node: int | None = Field(default=None, ge=1)
    """Number of devices of each machine. If left out: its GPUs; without GPUs, as many slots as the
    pools name, each with an equal share of the cores."""
    colocate: Literal["turns", "beside"] = "turns"
    """What roles do that share devices. `turns`: those that wait leave GPUs, with weights and
    states in the memory of the machine; so do engines that run ahead of training without GPUs.
    `beside`: all stay, and nothing moves; the devices must hold all of them at once, and engines
    there need a KV cache of a set size (`kv_cache_gb` of vLLM, `kv_cache_tokens` of SGLang)."""
    memory_gb: float | None = Field(default=None, gt=0)
    """Memory of each GPU in GiB, or of each machine if there are no GPUs. A run that is estimated
    to need more is refused. If left out: what this machine has; nothing is refused if the run joins
    a cluster. It is that of a GPU where the run joins a cluster, unless `platform` is `cpu`."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak speed of each device in matrix products of the dtype of training, without sparsity, in
    TFLOP/s; the part of it that the run reaches (MFU) is recorded. If left out: that of the GPU's
    name, where it is known; else no part is recorded."""
    address: str | None = None
    """Address of the Ray cluster to join, `host:port`. If left out: RAY_ADDRESS if that is set;
    otherwise a local Ray is started and stopped with the run, without the processes that `ray
    status` and `ray list` need."""
    start_timeout_s: float = Field(default=900, gt=0)
    """Time limit for workers, engines and missing nodes to start, in seconds. It includes loading
    weights and, on GPUs, compiling kernels and capturing graphs. Models of the hub are downloaded
    before that, without a limit; nodes that do not share the driver's cache download within the
    limit. The limit applies even if processes are busy, because processes that wait for each other
    in a deadlock look busy, too."""
    call_timeout_s: float = Field(default=3600, gt=0)
    """Time limit of one call to a worker, in seconds."""
