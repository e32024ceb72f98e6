"""Parts of the estimate of memory that depend on the kind of the run: what is on a device at once,
quantised checkpoints, latent attention, stages of Megatron, and rows that stay together."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.commands.memory.plan import (
    Devices,
    check_fit,
    devices_of,
)
from roll.core.errors import ConfigError
from roll.platform.machine import GIB
from tests.unit.commands.test_memory_estimate import recipe

JOINED = {"RAY_ADDRESS": "10.0.0.1:6379"}


@pytest.mark.parametrize("platform", ["auto", "cuda"])
def test_the_memory_told_of_a_joined_cluster_is_that_of_a_gpu(
    tmp_path: Path, platform: str
) -> None:
    cluster = f"cluster={{platform: {platform}, nodes: 2, devices_per_node: 8, memory_gb: 80}}"
    config = recipe(tmp_path, "Qwen3-8B", cluster, "pools={train: 0-15, infer: 0-15}")
    devices = devices_of(config, JOINED)
    assert devices == Devices("cuda", 80 * GIB, per_node=8)
    check_fit(config, devices)
    of_cpus = config.cluster.model_copy(update={"platform": "cpu"})
    joined = config.model_copy(update={"cluster": of_cpus})
    with pytest.raises(ConfigError, match="machine 0 needs"):
        check_fit(joined, devices_of(joined, JOINED))
