"""A restarted rank: calls to the old worker are told, the new one starts over, others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from roll.config.sections.roles import Role
from roll.core.errors import DataError, WaitTimeoutError, WorkerLostError
from roll.distributed.cluster import Cluster, Placement
from roll.distributed.local import LocalLauncher
from roll.distributed.on_ray.resources import ResourceManager
from roll.platform.processes import process_state
from tests.distributed.small_workers import Echo, Halting, Picky

INFER = Placement(Role.ACTOR_INFER, pool="pair", label="x", replaceable=True)


@pytest.fixture(scope="module")
def veto(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No worker can be built while this file exists."""
    return tmp_path_factory.mktemp("restart") / "veto"


@pytest.fixture(scope="module")
def cluster(launcher: ResourceManager | LocalLauncher, veto: Path) -> Iterator[Cluster[Picky]]:
    started = launcher.start(Picky, INFER, str(veto))
    yield started
    started.close()


def test_calls_to_a_restarted_rank_are_lost_and_the_other_rank_is_not_disturbed(
    cluster: Cluster[Picky],
) -> None:
    cluster.on([1]).call(Echo.open_gate)

    async def restart_in_the_middle() -> tuple[Sequence[object], str]:
        asks = [asyncio.ensure_future(cluster.ask(1, Echo.sleep, 600.0)) for _ in range(20)]
        other = asyncio.ensure_future(cluster.ask(0, Echo.wait_for_gate))
        await cluster.ask(1, Echo.echo, "all are under way")
        await asyncio.to_thread(cluster.restart, 1)
        lost = await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), 5)
        assert not other.done()
        await cluster.ask(0, Echo.open_gate)
        return lost, await asyncio.wait_for(other, 20)

    pending = cluster.submit(Echo.sleep, 600.0)
    lost, other = asyncio.run(restart_in_the_middle())
    assert other == "open"
    assert {type(each) for each in lost} == {WorkerLostError}
    assert {(e.role, e.label, e.rank) for e in lost if isinstance(e, WorkerLostError)} == {
        (Role.ACTOR_INFER, "x", 1)
    }
    assert "actor_infer:x[1]" in str(lost[0])
    with pytest.raises(WorkerLostError, match=r"actor_infer:x\[1\]"):
        pending.result(timeout_s=10)
    assert cluster.lost == frozenset()
    assert cluster.call_each(Echo.ping) == ["actor_infer:x[0]", "actor_infer:x[1]"]
    still_closed = cluster.on([1]).submit(Echo.wait_for_gate)
    assert not still_closed.poll(0.2), "the new worker has a gate of its own"
    cluster.on([1]).call(Echo.open_gate)
    assert still_closed.result() == "open"


def test_a_rank_whose_restart_fails_stays_lost_until_the_next_try(
    cluster: Cluster[Picky], veto: Path
) -> None:
    veto.touch()
    with pytest.raises(DataError, match="veto is in the way"):
        cluster.restart(0)
    assert cluster.lost == {0}
    with pytest.raises(WorkerLostError, match=r"actor_infer:x\[0\]"):
        cluster.call_each(Echo.ping)
    with pytest.raises(WorkerLostError, match=r"actor_infer:x\[0\]"):
        asyncio.run(cluster.ask(0, Echo.echo, "anybody there?"))
    assert cluster.on([1]).call(Echo.ping) == "actor_infer:x[1]"
    veto.unlink()
    cluster.restart(0)
    assert cluster.lost == frozenset()
    assert cluster.call(Echo.ping) == "actor_infer:x[0]"


def test_a_restart_without_time_for_the_process_says_so(manager: ResourceManager) -> None:
    cluster = manager.start(Echo, INFER)
    with pytest.raises(WaitTimeoutError, match=r"actor_infer:x\[0\]"):
        cluster.restart(0, 0.05)
    cluster.restart(0)
    assert cluster.on([0]).call(Echo.ping) == "actor_infer:x[0]"
    cluster.close()


def test_a_restarted_worker_adds_no_class_to_those_that_ray_keeps(manager: ResourceManager) -> None:
    cluster: Any = manager.start(Echo, INFER)

    def definition() -> Any:
        return cluster._actors[0]._handle._ray_actor_creation_function_descriptor

    first = definition()
    cluster.restart(0)
    assert definition() == first
    cluster.close()


@pytest.mark.slow
def test_nothing_is_left_of_one_that_was_stopped_while_it_was_built(
    manager: ResourceManager, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    cluster = manager.start(Halting, INFER, str(stop))
    stop.touch()
    with pytest.raises(WorkerLostError, match=r"actor_infer:x\[0\].*stopped \(SIGSTOP\)"):
        cluster.restart(0)
    assert process_state(int(stop.read_text())) is None
    stop.unlink()
    cluster.restart(0)
    assert cluster.on([0]).call(Echo.ping) == "actor_infer:x[0]"
    cluster.close()
