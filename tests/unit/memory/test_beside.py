"""Roles that stay beside each other on GPUs (`cluster.colocate: beside`): what they need together,
what is refused, and what is told of the other way."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.commands.memory.needs import Needs
from roll.commands.memory.plan import Devices, RoleMemory, check_fit, gib, of_devices, of_roles
from roll.commands.memory.report import report
from roll.core.errors import ConfigError
from roll.platform.machine import GIB
from tests.unit.memory.test_memory_estimate import CUDA, recipe

BESIDE = ("actor_infer.pool=train", "reference.pool=train", "cluster.colocate=beside")


def engine(**settings: float | str) -> str:
    told = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return f"actor_infer.strategy={{kind: vllm, {told}}}"


def test_roles_beside_each_other_need_the_sum_and_a_cache_of_a_set_size(tmp_path: Path) -> None:
    config = recipe(tmp_path, "Qwen3-4B", *BESIDE, engine(kv_cache_gb=4))
    roles, _ = of_roles(config, CUDA)
    needs = {each.role: each.needs for each in roles}
    assert len(needs) == 3
    moment = of_devices(config, roles, "cuda")[0]
    assert moment == {name: each.total for name, each in needs.items()}
    assert needs["actor_infer"].kv_cache == 4 * GIB
    check_fit(config, CUDA)
    need = sum(moment.values())
    with pytest.raises(ConfigError, match=r"take turns \(cluster.colocate: turns\), or give"):
        check_fit(config, Devices("cuda", 0.8 * need, per_node=8))
    share = recipe(tmp_path, "Qwen3-4B", *BESIDE)
    with pytest.raises(ConfigError, match=r"actor_infer\.strategy\.kv_cache_gb: set it\. With"):
        check_fit(share, CUDA)
    with pytest.raises(ConfigError, match="kv_cache_gb: set it"):
        check_fit(share, Devices("cuda", None, per_node=8))
    drops = recipe(tmp_path, "Qwen3-4B", *BESIDE, engine(kv_cache_gb=4, sleep_level=2))
    with pytest.raises(ConfigError, match="sleep_level: drop it"):
        check_fit(drops, CUDA)
    check_fit(share, Devices("cpu", 10_000 * GIB, per_node=8))
    apart = ("pools={train: 0-3, infer: 4-7}", *BESIDE[1:], "actor_infer.pool=infer")
    check_fit(recipe(tmp_path, "Qwen3-4B", *apart), CUDA)


def test_a_push_beside_an_engine_has_its_cache_there(tmp_path: Path) -> None:
    """A trainer whose passes need less than two buckets."""
    config = recipe(tmp_path, "Qwen3-4B", *BESIDE, "weight_sync.bucket_mb=20000")
    few = {"actor_train": Needs(weights=100), "actor_infer": Needs(weights=10, kv_cache=7)}
    roles = [RoleMemory(name, (0,), needs) for name, needs in few.items()]
    buckets = 2 * 20000 * 2**20
    assert of_devices(config, roles, "cuda")[0] == {
        "actor_train": 100,
        "actor_infer": 17,
        "buckets": buckets,
    }


def test_sglang_counts_other_roles_in_its_share(tmp_path: Path) -> None:
    sglang = "actor_infer.strategy={{kind: sglang, kv_cache_tokens: 9000, {}}}"
    config = recipe(tmp_path, "Qwen3-4B", *BESIDE, sglang.format("gpu_memory_utilization: 0.9"))
    need = sum(of_devices(config, of_roles(config, CUDA)[0], "cuda")[0].values())
    device = Devices("cuda", need, per_node=8)
    check_fit(config, device)
    low = recipe(tmp_path, "Qwen3-4B", *BESIDE, sglang.format("gpu_memory_utilization: 0.5"))
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.5, in which SGLang counts"):
        check_fit(low, device)
    own = recipe(tmp_path, "Qwen3-4B", *BESIDE, "actor_infer.strategy={kind: sglang}")
    with pytest.raises(ConfigError, match="kv_cache_tokens: set it"):
        check_fit(own, device)


def test_the_other_way_to_share_a_gpu_is_told_with_what_it_costs(tmp_path: Path) -> None:
    roomy = Devices("cuda", 500 * GIB, per_node=8)
    settings = ("actor_infer.pool=train", "reference.pool=train", engine(kv_cache_gb=4))
    config = recipe(tmp_path, "Qwen3-4B", *settings)
    needs = [each.needs for each in of_roles(config, roomy)[0]]
    moved, both = 2 * sum(n.resident for n in needs), sum(n.total for n in needs)
    (line,) = (line for line in report(config, roomy)[1] if "taking turns" in line)
    assert f"taking turns moves about {gib(moved)} GiB a step" in line
    assert line.endswith(
        f"need about {gib(both)} GiB on each, {gib(4 * GIB)} of it KV caches, and fit"
    )
    (line,) = (line for line in report(config, CUDA)[1] if "taking turns" in line)
    assert line.endswith(", and fit" if both <= 80 * GIB else ", which is more than it has")
    stays = recipe(tmp_path, "Qwen3-4B", *settings, "cluster.colocate=beside")
    (line,) = (line for line in report(stays, roomy)[1] if "colocate: turns" in line)
    assert f"and move about {gib(moved)} GiB a step" in line
    alone = recipe(
        tmp_path, "Qwen3-4B", "pools={train: 0-1, infer: 2-3, ref: 4-5}", "reference.pool=ref"
    )
    assert not [line for line in report(alone, roomy)[1] if "colocate" in line]
