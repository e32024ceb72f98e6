"""Which engines get which tensors in which push; real transfers, no models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from roll.config.sections.model import LoraConfig
from roll.config.sections.roles import Role
from roll.config.sections.weights import WeightSyncConfig
from roll.core.errors import EngineDiedError, WeightSyncError
from roll.core.types import RankInfo, WorkerSpec
from roll.distributed.cluster import Placement
from roll.distributed.local import LocalLauncher
from roll.distributed.worker import Worker
from roll.runtime.weight_pusher import WeightPusher
from roll.strategy.interfaces import LoadReport
from roll.weight_sync.abort import PushAborts
from roll.weight_sync.channel import Channel
from roll.weight_sync.checks import check_shapes
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import receive
from roll.weight_sync.transport_choice import Endpoint, new_channel
from roll.workers.actor import ActorWorker
from roll.workers.infer import InferWorker

WEIGHTS = {"frozen.a.w": torch.arange(5.0), "moving.b.w": torch.arange(3.0)}
FROZEN = frozenset({"frozen.a.w"})
ADAPTER = {"b.lora_A.weight": torch.ones(2, 3), "b.lora_B.weight": torch.zeros(3, 2)}
LORA = LoraConfig(rank=2, alpha=5.0, serve="adapter")


class Policy:
    """As much of a `TrainStrategy` as a push asks for."""

    rank_info = RankInfo(0, 0, 1, is_dp_leader=True)

    def weight_manifest(self, *, adapter: bool = False) -> Manifest:
        return Manifest.of((ADAPTER if adapter else WEIGHTS).items())

    def frozen_weights(self) -> frozenset[str]:
        return FROZEN

    def export_parts(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        yield from (ADAPTER if adapter else WEIGHTS).items()


class Engine:
    """As much of an `InferenceStrategy`; notes what it gets."""

    def __init__(self) -> None:
        self.pushes: list[tuple[int, set[str]]] = []
        self.refuses = self.fails = False
        self.channel: Channel | None = None
        self.dies = False
        self.held: frozenset[str] = frozenset()

    async def load_weights(
        self, channel: Channel, version: int, *, receiver: int, verify: bool
    ) -> LoadReport:
        if self.dies:
            raise EngineDiedError("the engine is gone")
        return await asyncio.to_thread(self._receive, channel, version, receiver, WEIGHTS)

    async def load_adapter(
        self, channel: Channel, version: int, *, receiver: int, alpha: float, verify: bool
    ) -> LoadReport:
        assert alpha == LORA.alpha
        return await asyncio.to_thread(self._receive, channel, version, receiver, ADAPTER)

    def _receive(
        self, channel: Channel, version: int, receiver: int, expected: Mapping[str, Tensor]
    ) -> LoadReport:
        def check(manifest: Manifest) -> None:
            if self.refuses:
                raise WeightSyncError("not now")
            shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
            check_shapes(manifest, shapes, optional=frozenset(), held=self.held)

        self.channel = channel
        with receive(channel, receiver, check=check) as incoming:
            names = {name for name, _ in incoming.tensors()}
            if self.fails:
                raise WeightSyncError("no memory")
        self.held |= names
        self.pushes.append((version, names))
        return LoadReport(version, len(names), 0, incoming.checksum)


class Trainer(ActorWorker):
    def __init__(self, spec: WorkerSpec, lora: LoraConfig | None) -> None:
        Worker.__init__(self, spec)
        self.strategy = cast(Any, Policy())
        self.pushes_adapter = lora is not None
        self.aborts = PushAborts()

    def close(self) -> None:
        """Owns nothing."""


class Replica(InferWorker):
    """Says that it is on another machine than the trainer if `far`."""

    far = False

    def __init__(self, spec: WorkerSpec, engines: list[Engine], lora: LoraConfig | None) -> None:
        Worker.__init__(self, spec)
        self.lora = lora
        self.engine = cast(Any, engines[spec.rank])

    async def places(self) -> list[Endpoint]:
        return [replace(place, node=int(self.far)) for place in await super().places()]

    async def close(self) -> None:
        """Owns nothing."""


class FarReplica(Replica):
    far = True


@pytest.fixture
def engines() -> list[Engine]:
    return [Engine() for _ in range(3)]


@pytest.fixture(params=["auto", "files"])
def pusher(
    request: pytest.FixtureRequest, engines: list[Engine], tmp_path: Path
) -> Iterator[WeightPusher]:
    config = WeightSyncConfig()
    if request.param == "files":
        config = WeightSyncConfig(transport="files", folder=str(tmp_path))
    with started(engines, config, lora=None) as pusher:
        yield pusher


@contextmanager
def started(
    engines: list[Engine],
    config: WeightSyncConfig,
    lora: LoraConfig | None,
    kind: type[Replica] = Replica,
) -> Iterator[WeightPusher]:
    with (
        LocalLauncher(call_timeout_s=30) as one,
        LocalLauncher(world_size=3, call_timeout_s=30) as three,
    ):
        actor: Any = one.start(Trainer, Placement(Role.ACTOR_TRAIN, pool="p"), lora)
        infer: Any = three.start(kind, Placement(Role.ACTOR_INFER, pool="p"), engines, lora)
        yield WeightPusher(actor, infer, "cpu", config)


@pytest.mark.parametrize(
    "wrong", [{"transport": "files"}, {"folder": "/somewhere"}], ids=["no folder", "no files"]
)
def test_a_folder_and_the_transport_by_files_need_each_other(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="need each other"):
        WeightSyncConfig(**wrong)


ALL = set(WEIGHTS)
EVERYBODY = range(3)
MOVING = ALL - FROZEN


def test_frozen_tensors_travel_in_the_first_push_only(
    pusher: WeightPusher, engines: list[Engine]
) -> None:
    pusher.push(1, EVERYBODY, verify=True)
    pusher.push(2, EVERYBODY, verify=False)
    assert [engine.pushes for engine in engines] == [[(1, ALL), (2, MOVING)]] * 3


def test_an_adapter_that_engines_serve_travels_alone(engines: list[Engine]) -> None:
    with started(engines, WeightSyncConfig(), LORA) as pusher:
        pusher.push(1, EVERYBODY, verify=True)
        pusher.push(2, EVERYBODY, verify=False)
    assert [engine.pushes for engine in engines] == [[(1, {*ADAPTER}), (2, {*ADAPTER})]] * 3


def test_a_push_reaches_the_named_replicas_only(
    pusher: WeightPusher, engines: list[Engine]
) -> None:
    pusher.push(1, EVERYBODY, verify=True)
    pusher.push(2, [2, 0], verify=True)
    assert [[version for version, _ in engine.pushes] for engine in engines] == [
        [1, 2],
        [1],
        [1, 2],
    ]


def test_a_restarted_replica_gets_everything(pusher: WeightPusher, engines: list[Engine]) -> None:
    pusher.push(1, EVERYBODY, verify=True)
    engines[1].held = frozenset()
    pusher.forget(1)
    pusher.push(1, [1], verify=True)
    pusher.push(2, EVERYBODY, verify=True)
    assert engines[1].pushes == [(1, ALL), (1, ALL), (2, MOVING)]
    assert engines[0].pushes == [(1, ALL), (2, MOVING)]


def test_a_receiver_that_dies_before_it_connects_costs_no_time_limit(
    pusher: WeightPusher, engines: list[Engine]
) -> None:
    engines[2].dies = True
    begun = time.monotonic()
    with pytest.raises(EngineDiedError, match="the engine is gone"):
        pusher.push(1, EVERYBODY, verify=False)
    assert time.monotonic() - begun < 5
    pusher.push(1, [0, 1], verify=False)  # whoever waited in the first is free
    assert [engine.pushes for engine in engines] == [[(1, ALL)], [(1, ALL)], []]
    assert time.monotonic() - begun < 10


def test_after_a_refusal_everything_travels_again(
    pusher: WeightPusher, engines: list[Engine]
) -> None:
    pusher.push(1, EVERYBODY, verify=True)
    engines[1].refuses = True
    with pytest.raises(WeightSyncError, match="not now"):
        pusher.push(2, EVERYBODY, verify=True)
    engines[1].refuses = False
    pusher.push(3, EVERYBODY, verify=True)
    assert [engine.pushes for engine in engines] == [[(1, ALL), (3, ALL)]] * 3


def test_across_hosts_the_metrics_tell_how_many_groups_pushes_made(engines: list[Engine]) -> None:
    def made(pusher: WeightPusher) -> dict[str, float]:
        return pusher.take_metrics().values_by_name()

    name = "weight_sync/groups_made"
    with started(engines, WeightSyncConfig(), lora=None, kind=FarReplica) as pusher:
        assert made(pusher) == {}
        pusher.push(1, EVERYBODY, verify=True)
        assert made(pusher) == {name: 1}
        pusher.push(2, EVERYBODY, verify=True)
        assert made(pusher) == {name: 0}
        engines[1].fails = True
        with pytest.raises(WeightSyncError, match="no memory"):
            pusher.push(3, EVERYBODY, verify=True)
        engines[1].fails = False
        pusher.push(3, EVERYBODY, verify=True)
        pusher.push(3, [1], verify=True)
        assert made(pusher) == {name: 2}
        assert made(pusher) == {}
    with started(engines, WeightSyncConfig(kept_groups=0), lora=None, kind=FarReplica) as pusher:
        for version in (4, 5):
            pusher.push(version, EVERYBODY, verify=True)
        assert made(pusher) == {name: 2}
    with started(engines, WeightSyncConfig(), lora=None) as pusher:
        pusher.push(6, EVERYBODY, verify=True)
        assert made(pusher) == {}  # on one host there are no groups


def test_a_channel_names_the_places_of_its_receivers(
    pusher: WeightPusher, engines: list[Engine]
) -> None:
    pusher.push(1, [2, 0], verify=True)
    assert engines[0].channel == engines[2].channel
    assert engines[0].channel is not None
    assert engines[0].channel.receivers == ("actor_infer[2].0", "actor_infer[0].0")
    assert engines[0].channel.kept_groups == WeightSyncConfig().kept_groups == 6


def test_a_late_call_for_an_older_push_does_not_hide_the_running_one() -> None:
    aborts = PushAborts()
    older, running = (new_channel("shared_memory", num_receivers=1, timeout_s=1) for _ in range(2))
    aborts.of(older)
    sending = aborts.of(running)
    aborts.of(older).give_up("receiver 0 is dead")
    aborts.of(running).give_up("receiver 1 is dead")
    assert sending.reason == "receiver 1 is dead"
