"""One Ray per module: starting it takes seconds, and it holds all cores until it is closed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roll.config.sections.placement import ClusterConfig
from roll.distributed.local import LocalLauncher
from roll.distributed.on_ray.resources import ResourceManager
from tests.distributed.small_workers import ROOT


@pytest.fixture(scope="module")
def manager() -> Iterator[ResourceManager]:
    """Four slots on however many cores there are; `pair` and `other` overlap in slot 1."""
    cluster = ClusterConfig(platform="cpu", devices_per_node=4, start_timeout_s=300)
    pools = {"one": "0", "pair": "0-1", "other": "1,3", "all": "0-3"}
    with ResourceManager(cluster, pools, python_path=[ROOT]) as resources:
        yield resources


@pytest.fixture(scope="module", params=["ray", "local"])
def launcher(
    request: pytest.FixtureRequest, manager: ResourceManager
) -> Iterator[ResourceManager | LocalLauncher]:
    if request.param == "ray":
        yield manager
    else:
        with LocalLauncher(world_size=2) as local:
            yield local
