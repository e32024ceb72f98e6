"""What the machine has, how pools are laid out on it, and what a platform gives a worker."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll.config.sections.placement import ClusterConfig
from roll.core.errors import ConfigError
from roll.distributed.device_layout import plan_layout, share_cores
from roll.distributed.on_ray.environment import (
    RUN_TOKEN,
    SPIN_BRIEFLY,
    WAITING,
    WORKER_TOKEN,
    actor_env,
    on_one_machine,
    prepare_ray,
    secrets,
    thread_waiting,
)
from roll.distributed.on_ray.nodes import Node, numbered, with_devices
from roll.platform import get_platform
from roll.platform.machine import (
    Machine,
    count_gpus,
    free_port,
    gpu_memory_gb,
    memory_limits,
    this_machine,
)
from roll.platform.processes import descendants, tree_rss_bytes

CPU_MACHINE = Machine(gpus=0, cores=(0, 1, 2, 3), memory_gb=8)
GPU_MACHINE = Machine(gpus=4, cores=tuple(range(16)), memory_gb=128)


def test_a_platform_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown platform 'tpu'"):
        get_platform("tpu")


@pytest.mark.slow
def test_two_ranks_add_their_numbers_through_the_cpu_platform() -> None:
    code = (
        "import sys, torch; from types import SimpleNamespace as N;"
        "from roll.platform import get_platform; p = get_platform('cpu');"
        "place = N(rank=int(sys.argv[1]), world_size=2, devices=(0,), rendezvous=sys.argv[2]);"
        "p.init_process_group(place, timeout_s=60); x = torch.tensor(place.rank + 1.0);"
        "torch.distributed.all_reduce(x); p.destroy(); sys.exit(int(x))"
    )
    address = f"127.0.0.1:{free_port()}"
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(rank), address]) for rank in (0, 1)]
    assert [rank.wait(timeout=60) for rank in ranks] == [3, 3]


def test_a_worker_on_the_cpu_has_the_cpu_as_its_device() -> None:
    assert get_platform("cpu").device() == torch.device("cpu")
    assert get_platform("cuda").device() == torch.device("cuda", 0)


def test_a_free_port_is_none_that_the_kernel_hands_out(tmp_path: Path) -> None:
    handed_out = tmp_path / "ip_local_port_range"
    with socket.socket() as taken:
        for port in range(20_050, 20_100):
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port))
                break
        handed_out.write_text(f"{port + 1}\t60999\n")
        ports = {free_port(handed_out) for _ in range(200)}
    assert ports
    assert all(20_000 <= each < port for each in ports)


def test_any_free_port_will_do_where_the_kernel_hands_out_all(tmp_path: Path) -> None:
    handed_out = tmp_path / "ip_local_port_range"
    handed_out.write_text("1024\t65535\n")
    assert free_port(handed_out) > 1023


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 3), ("0,2", 2), ("", 0), ("-1", 0), ("1", 1), ("0,9,1", 1), ("GPU-ab,GPU-cd", 2)],
)
def test_gpus_are_counted_as_cuda_would_show_them(
    tmp_path: Path, visible: str | None, expected: int
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, *driver_of(tmp_path, gpus=3, nodes=3)) == expected


def driver_of(folder: Path, *, gpus: int, nodes: int) -> tuple[Path, Path]:
    """Where the driver of a machine lists its GPUs, and where a process finds those of its own."""
    listed, devices = folder / "gpus", folder / "dev"
    for number in range(gpus):
        (listed / f"0000:0{number}").mkdir(parents=True)
    devices.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "null"):
        (devices / name).touch()
    for number in range(nodes):
        (devices / f"nvidia{gpus - 1 - number}").touch()
    return listed, devices


@pytest.mark.parametrize(
    ("nodes", "smi", "expected"), [(0, None, 0), (2, None, 2), (0, 8, 8), (1, 1, 1)]
)
def test_a_container_has_the_gpus_that_it_was_given(
    tmp_path: Path, nodes: int, smi: int | None, expected: int
) -> None:
    """The driver lists those of the machine, whatever the container."""
    if smi is not None:
        program = tmp_path / "nvidia-smi"
        lines = [f"echo 'GPU {number}: NVIDIA H200 (UUID: GPU-{number})'" for number in range(smi)]
        program.write_text("\n".join(["#!/bin/sh", *lines]))
        program.chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    assert count_gpus(environ, *driver_of(tmp_path, gpus=8, nodes=nodes)) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 16.0),
        ("", None),
        ("1,2", 40.0),
        ("2", 80.0),
        ("2,9,0", 80.0),
        ("GPU-c,GPU-bb", 40.0),
        ("GPU-c1", 80.0),
        ("GPU-zz,0", None),
        ("MIG-1234", None),
    ],
)
def test_the_memory_of_a_gpu_is_that_of_the_smallest_that_cuda_shows(
    tmp_path: Path, visible: str | None, expected: float | None
) -> None:
    program = tmp_path / "nvidia-smi"
    lines = ("GPU-a1, 16384", "GPU-bb1, 40960", "GPU-c1, 81920")
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    assert gpu_memory_gb(environ) == expected


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    (groups / "job").mkdir(parents=True)
    (groups / "memory").mkdir()
    (groups / "memory.max").write_text("5000\n")
    (groups / "job" / "memory.max").write_text("max\n")
    (groups / "memory" / "memory.limit_in_bytes").write_text("7000\n")
    own.write_text("0::/job\n")
    assert memory_limits(own, groups) == [5000]
    own.write_text("4:cpu,memory:/not/mounted/here\n3:cpuset:/\n")
    assert memory_limits(own, groups) == [7000]
    assert memory_limits(tmp_path / "no_such_file", groups) == []


def test_cores_are_those_this_process_may_use() -> None:
    assert set(this_machine().cores) == os.sched_getaffinity(0)


def test_looking_at_the_machine_and_planning_pools_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys; import roll.platform.machine, roll.distributed.device_layout;"
        "roll.platform.machine.this_machine();"
        "sys.exit(', '.join({'torch', 'ray'} & set(sys.modules)) or 0)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr


def test_a_child_of_a_child_counts_as_a_descendant_and_its_memory_too() -> None:
    inner = "import time; x = bytearray(60_000_000); print('up', flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        below = descendants(child.pid)
        assert len(below) == 1
        assert tree_rss_bytes(child.pid) > 60_000_000
        os.kill(below[0], 9)


def test_pools_on_a_cpu_machine_make_as_many_slots_as_they_name() -> None:
    layout = plan_layout(ClusterConfig(), {"a": "0-1", "b": "2"}, CPU_MACHINE, joined=False)
    assert (layout.platform, layout.nodes, layout.devices_per_node) == ("cpu", 1, 3)
    assert layout.pools == {"a": (0, 1), "b": (2,)}


def test_pools_on_a_gpu_machine_use_its_gpus() -> None:
    layout = plan_layout(ClusterConfig(), {"a": "3"}, GPU_MACHINE, joined=False)
    assert (layout.platform, layout.devices_per_node) == ("cuda", 4)
    on_cpu = plan_layout(ClusterConfig(platform="cpu"), {"a": "0"}, GPU_MACHINE, joined=False)
    assert (on_cpu.platform, on_cpu.devices_per_node) == ("cpu", 1)


@pytest.mark.parametrize(
    ("cluster", "pools", "machine", "message"),
    [
        (ClusterConfig(), {"a": "0-4"}, CPU_MACHINE, r"5 CPU slots .* has 4 core"),
        (ClusterConfig(), {"a": "0-4"}, GPU_MACHINE, r"pools.a names device 4, .* 4 GPUs"),
        (ClusterConfig(devices_per_node=2), {"a": "0-2"}, CPU_MACHINE, r"pools.a .* 2 CPU slots"),
        (ClusterConfig(devices_per_node=8), {"a": "0"}, GPU_MACHINE, r"is 8 but a node has 4"),
        (ClusterConfig(platform="cuda"), {"a": "0"}, CPU_MACHINE, "no NVIDIA GPU was found"),
        (ClusterConfig(nodes=2), {"a": "0"}, CPU_MACHINE, "no Ray cluster to join"),
    ],
)
def test_a_pool_larger_than_the_machine_is_refused_with_both_numbers(
    cluster: ClusterConfig, pools: dict[str, str], machine: Machine, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_layout(cluster, pools, machine, joined=False)


def test_slots_may_outnumber_the_cores_when_the_file_says_so() -> None:
    cluster = ClusterConfig(devices_per_node=6)
    assert plan_layout(cluster, {"a": "0-5"}, CPU_MACHINE, joined=False).devices_per_node == 6


def test_pools_over_two_joined_nodes_divide_their_slots() -> None:
    layout = plan_layout(ClusterConfig(nodes=2), {"a": "0-4"}, CPU_MACHINE, joined=True)
    assert (layout.nodes, layout.devices_per_node) == (2, 3)


@given(cores=st.integers(1, 64), slots=st.integers(1, 80))
def test_core_shares_are_equal_and_disjoint_while_there_are_enough(cores: int, slots: int) -> None:
    shares = share_cores(tuple(range(cores)), slots)
    assert {len(share) for share in shares} == {max(1, cores // slots)}
    given_out = [core for share in shares for core in share]
    assert set(given_out) <= set(range(cores))
    if slots <= cores:
        assert len(set(given_out)) == len(given_out)


def test_an_actor_sees_its_gpus_its_threads_and_the_users_folder() -> None:
    libraries = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "HF_HUB_OFFLINE": "1",
        "NCCL_IB_HCA": "mlx5",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "SGLANG_LOG_LEVEL": "error",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "VLLM_USE_V1": "1",
    }
    others = {"SECRET": "x", "CUDA_VISIBLE_DEVICES": "7", "VLLM_HOST_IP": "10.0.0.1"}
    driver = {"PYTHONPATH": "/b:/c"} | libraries | others
    env = actor_env(
        platform="cuda",
        devices=("2", "3"),
        cores=(4, 5, 6),
        token="t",
        python_path=["/a", "/b"],
        driver_environ=driver,
    )
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["PYTHONPATH"] == "/a:/b:/c"
    assert env.items() >= libraries.items()
    assert env[WORKER_TOKEN] == "t"
    assert not {"SECRET", "VLLM_HOST_IP"} & env.keys(), "the address of another node"
    assert "GLOO_SOCKET_IFNAME" not in env, "ranks of several machines would not meet"


def test_secrets_take_another_way_than_the_variables_that_ray_logs() -> None:
    driver = {"HF_TOKEN": "a", "VLLM_API_KEY": "b", "HF_HOME": "/h", "OTHER_TOKEN": "c"}
    own = {"MY_PASSWORD": "d", "HF_TOKEN": "e"}
    env = actor_env(
        platform="cpu", devices=(), cores=(0,), token="t", own=own, driver_environ=driver
    )
    assert env["HF_HOME"] == "/h"
    assert not set("abcde") & set(env.values())
    assert secrets(own, driver) == {"HF_TOKEN": "e", "VLLM_API_KEY": "b", "MY_PASSWORD": "d"}


def test_a_head_without_gpus_is_no_node_of_a_run_on_gpus() -> None:
    """A run with two nodes of 8 GPUs would else begin, or give up, with the head and the first."""
    head, first, second = Node("h", "h", 4, 0), Node("a", "a", 64, 8), Node("b", "b", 64, 8)
    for platform in ("auto", "cuda"):
        assert with_devices([head, first], platform, 8) == [first]
        assert with_devices([head, first, second], platform, None) == [first, second]
        assert with_devices([head, Node("c", "c", 64, 4)], platform, 8) == []
    assert with_devices([head], "auto", 8) == [head]
    assert with_devices([head], "cuda", None) == []
    assert with_devices([head, first], "cpu", None) == [head, first]


def test_gpus_are_numbered_by_their_number_or_in_the_order_of_their_uuids() -> None:
    assert numbered(["10", "2"]) == [(2, "2", 1), (10, "10", 0)]
    uuids = ["GPU-c0", "MIG-0a", "GPU-1b"]
    assert numbered(uuids) == [(0, "GPU-1b", 2), (1, "GPU-c0", 0), (2, "MIG-0a", 1)]


def test_variables_of_a_role_come_before_those_of_the_driver_and_of_roll() -> None:
    own = {"NCCL_IB_HCA": "mlx7", "MALLOC_ARENA_MAX": "3", "OMP_NUM_THREADS": "9", "KEY": "k"}
    env = actor_env(
        platform="cpu",
        devices=(),
        cores=(0,),
        token="t",
        own=own | {"GOMP_SPINCOUNT": "5"},
        driver_environ={"NCCL_IB_HCA": "mlx5", "MALLOC_ARENA_MAX": "4", "KEY": "other"},
    )
    assert env.items() >= own.items()
    assert {name: env[name] for name in WAITING if name in env} == {"GOMP_SPINCOUNT": "5"}


@pytest.mark.parametrize("keep_memory", [False, True])
def test_an_actor_on_cpus_has_one_heap_unless_the_user_names_a_number(keep_memory: bool) -> None:
    def heaps(platform: str, driver: dict[str, str]) -> str | None:
        env = actor_env(
            platform=platform,
            devices=(),
            cores=(0,),
            token="t",
            keep_memory=keep_memory,
            driver_environ=driver,
        )
        return env.get("MALLOC_ARENA_MAX")

    assert heaps("cpu", {}) == "1"
    assert heaps("cpu", {"MALLOC_ARENA_MAX": "4"}) == "4"
    assert heaps("cuda", {}) is None


@pytest.mark.parametrize("own", [{}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}])
def test_threads_on_cpus_keep_no_freed_blocks_unless_the_user_tunes_glibc(
    own: dict[str, str],
) -> None:
    env = actor_env(platform="cpu", devices=(), cores=(0,), token="t", driver_environ=own)
    assert env["GLIBC_TUNABLES"] == own.get("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")


@pytest.mark.parametrize(
    "own", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "passive"}]
)
def test_threads_spin_briefly_where_roles_overlap_or_as_the_user_says(
    own: dict[str, str],
) -> None:
    assert thread_waiting({"OTHER": "1"}, overlapping=True) == SPIN_BRIEFLY
    assert thread_waiting({"OTHER": "1"}, overlapping=False) == {}
    assert thread_waiting(own | {"OTHER": "1"}, overlapping=True) == own
    assert thread_waiting(own | {"OTHER": "1"}, overlapping=False) == own


@pytest.mark.parametrize(
    ("have", "expected"),
    [
        ({}, "narenas:1,tcache:false"),
        ({"MALLOC_CONF": "narenas:7"}, "narenas:7"),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, None),
    ],
)
def test_rays_control_store_has_one_arena_unless_the_user_chose_something(
    monkeypatch: pytest.MonkeyPatch, have: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {RUN_TOKEN: f"{os.getpid()}-x", **have})
    prepare_ray()
    assert os.environ.get("MALLOC_CONF") == expected


@pytest.mark.parametrize(("have", "expected"), [({}, "0"), ({"RAY_worker_niceness": "7"}, "7")])
def test_workers_have_the_priority_of_other_programs_unless_the_user_chose_another(
    monkeypatch: pytest.MonkeyPatch, have: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(os, "environ", {RUN_TOKEN: f"{os.getpid()}-x", **have})
    prepare_ray()
    assert os.environ.get("RAY_worker_niceness") == expected  # noqa: SIM112


def test_process_groups_of_one_machine_take_the_loopback_interface_or_what_the_user_names() -> None:
    def interfaces(driver: dict[str, str]) -> list[str]:
        env = actor_env(
            platform="cpu",
            devices=(),
            cores=(0,),
            token="t",
            single_host=True,
            driver_environ=driver,
        )
        return [env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]]

    assert interfaces({}) == ["lo", "lo"]
    named = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"}
    assert interfaces(named) == ["eth7", "ib0"]
    assert list(on_one_machine(named).values()) == ["eth7", "ib0"]
