"""What only real processes show: slots, colocation, collectives, errors of one rank of several."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch

from roll.config.sections.placement import ClusterConfig
from roll.config.sections.roles import Role
from roll.core.batches import TokenBatch
from roll.core.errors import ConfigError, WaitTimeoutError, WorkerError
from roll.distributed.cluster import Placement
from roll.distributed.dispatch import Call
from roll.distributed.on_ray.cluster import shared_batches
from roll.distributed.on_ray.environment import environment
from roll.distributed.on_ray.resources import ResourceManager
from roll.platform.machine import GIB, cores
from roll.platform.processes import descendants
from roll.platform.usage import use_of_machine
from tests.distributed.small_workers import Adder, HalfAdder


def test_each_rank_is_told_its_place_and_has_a_process_of_its_own(
    manager: ResourceManager,
) -> None:
    cluster = manager.start(Adder, Placement(Role.CRITIC, pool="other", seed=11), 0)
    told = cluster.call_each(Adder.where)
    assert len({os.getpid(), *(pid for pid, _, _ in told)}) == 3
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid, _, _ in told] == [own, own]
    specs = [spec for _, spec, _ in told]
    assert [spec.devices for spec in specs] == [(1,), (3,)]
    assert [spec.rank for spec in specs] == [0, 1]
    assert {(spec.role, spec.world_size, spec.seed, spec.node) for spec in specs} == {
        (Role.CRITIC, 2, 11, 0)
    }
    share = max(1, len(cores()) // 4)
    assert [len(spec.cores) for spec in specs] == [share, share]
    assert all(env["OMP_NUM_THREADS"] == str(share) for _, _, env in told)
    assert cluster.call_each(Adder.threads) == [share, share]
    assert [info.pid for info in cluster.infos] == [pid for pid, _, _ in told]
    assert all(gb > 0.05 for gb in cluster.call_each(Adder.memory_gb))
    used = cluster.beside(Adder.usage).result()
    assert all(one.resident > 0.05 * GIB for one in used)
    assert [one.machine.machine for one in used] == [use_of_machine().machine] * 2
    cluster.close()


def test_ray_runs_only_what_a_run_has_a_use_for(manager: ResourceManager) -> None:
    commands = []
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # gone in the meantime
            commands.append(Path(f"/proc/{pid}/cmdline").read_text())
    assert any("gcs_server" in command for command in commands)
    for script in ("log_monitor.py", "monitor.py", "dashboard.py"):
        assert not [command for command in commands if f"/{script}" in command]


def test_two_roles_share_a_pool_and_ranks_of_one_role_talk_to_each_other(
    manager: ResourceManager,
) -> None:
    first = manager.start(Adder, Placement(Role.ACTOR_TRAIN, pool="pair"), 0)
    own = {"NCCL_IB_HCA": "mlx7"}
    second = manager.start(Adder, Placement(Role.REFERENCE, pool="pair", env=own), 0)
    assert [s.devices for _, s, _ in first.call_each(Adder.where)] == [(0,), (1,)]
    assert [s.devices for _, s, _ in second.call_each(Adder.where)] == [(0,), (1,)]
    assert all("NCCL_IB_HCA" not in env for _, _, env in first.call_each(Adder.where))
    assert all(env.items() >= own.items() for _, _, env in second.call_each(Adder.where))
    sums = [first.submit(Adder.summed_rank), second.submit(Adder.summed_rank)]
    assert [each.result() for each in sums] == [3.0, 3.0]
    first.close()
    second.close()
    first.close()  # a second time does nothing


def test_variables_of_a_role_are_there_before_the_first_import_and_secrets_in_no_file(
    manager: ResourceManager,
) -> None:
    own = {"NCCL_IB_HCA": "mlx7", "OMP_NUM_THREADS": "3", "MY_API_KEY": "word-of-the-role"}
    users = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9", "HF_TOKEN": "word-of-the-user"}
    with environment(users):  # Ray runs already, so they reach no worker by inheritance
        cluster = manager.start(Adder, Placement(Role.CRITIC, pool="one", env=own), 0)
    ((pid, _, env),) = cluster.call_each(Adder.where)
    assert env.items() >= (own | users).items()
    at_start = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {b"NCCL_IB_HCA=mlx7", b"TORCH_NCCL_TRACE_BUFFER_SIZE=9"} <= set(at_start)
    assert cluster.call_each(Adder.threads) == [3]
    logs = [file for file in Path(cluster.infos[0].log).parent.rglob("*") if file.is_file()]
    written = b"".join(file.read_bytes() for file in logs)
    assert b"mlx7" in written, "Ray logs runtime environments, so this looks at the right files"
    assert b"word-of-the" not in written
    cluster.close()


def test_results_come_from_the_leaders_of_each_part(manager: ResourceManager) -> None:
    cluster = manager.start(HalfAdder, Placement(Role.ACTOR_TRAIN, pool="all"), 0)
    batch = TokenBatch(tokens=torch.tensor([[10], [20]]), lengths=torch.ones(2).long())
    assert cluster.dp_size == 2
    assert cluster.call(HalfAdder.add, batch).tokens.tolist() == [[110], [320]]
    answers = cluster.call_each(HalfAdder.add, batch)
    assert [each is None for each in answers] == [True, False, True, False], "sent for nothing"
    cluster.call(HalfAdder.remember, batch)
    assert cluster.call_each(HalfAdder.recall) == [[[10]], [[11]], [[22]], [[23]]]
    cluster.close()


def test_a_batch_for_several_ranks_is_stored_once(manager: ResourceManager) -> None:
    one, other = (
        TokenBatch(tokens=torch.tensor([[i]]), lengths=torch.ones(1).long()) for i in range(2)
    )
    calls = [Call((one, 5)), Call((one, 5)), Call((other, 5))]
    (first, five), (second, _), (third, _) = (call.args for call in shared_batches(calls))
    assert first is second
    assert ray.get(first).tokens.tolist() == [[0]]
    assert (five, third) == (5, other)


def test_one_rank_that_raises_ends_the_wait_for_the_others(manager: ResourceManager) -> None:
    cluster = manager.start(Adder, Placement(Role.ACTOR_TRAIN, pool="pair"), 0)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="no tokens in this batch") as caught:
        cluster.call(Adder.raise_bug_on_last_rank)
    assert time.monotonic() - start < 10
    assert "actor_train[1].raise_bug_on_last_rank raised ZeroDivisionError" in str(caught.value)
    assert "small_workers.py" in str(caught.value)  # the remote traceback
    cluster.close(graceful=False)


def test_a_wait_names_the_ranks_that_have_not_answered(manager: ResourceManager) -> None:
    cluster = manager.start(Adder, Placement(Role.ACTOR_TRAIN, pool="pair"), 0)
    pending = cluster.submit(Adder.sleep, (0.0, 3.0))
    with pytest.raises(WaitTimeoutError) as caught:
        pending.result(timeout_s=1)
    told = "waited 1 s for actor_train[0..1].sleep (rank 1 has not answered)"
    assert str(caught.value).startswith(told)
    assert pending.result() == 0
    cluster.close()


def test_slots_that_do_not_divide_or_do_not_exist_are_refused(manager: ResourceManager) -> None:
    assert [[s.number for s in own] for own in manager.slots("all", 2)] == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match="no pool is called 'trian'"):
        manager.slots("trian")
    with pytest.raises(ConfigError, match="2 devices, which do not divide into workers of 3"):
        manager.slots("pair", 3)


def test_a_pool_larger_than_the_machine_is_refused_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"pools.big names device 9, but there are 2 CPU slots"):
        ResourceManager(ClusterConfig(platform="cpu", devices_per_node=2), {"big": "0-9"})
    assert time.monotonic() - start < 5
